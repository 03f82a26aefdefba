// Starting a cluster: a form of what the kernel says can be chosen.

import { announce } from './announce';
import { problemText } from './asker';
import { button, h, setBusy, setText, show, uniqueId } from './dom';
import { ensureStyle } from './css';
import type { Link } from './link';
import { type IActions, type IView, linkTrouble } from './view';

export interface IField {
  name: string;
  kind: 'count' | 'flag' | 'text' | 'seconds' | 'hours' | 'choice';
  label: string;
  help?: string;
  default?: string | number | boolean | null;
  choices?: string[];
}

interface IKinds {
  launchers: { name: string; summary: string }[];
  fields: IField[];
  line: string;
}

interface IStarted {
  cluster: string;
  variable: string;
  line: string;
  reused: boolean;
}

type Input = HTMLInputElement | HTMLSelectElement;

export class StartForm implements IView {
  readonly node = h('section', { class: 'tfd-live tfd-start', 'aria-label': 'start a cluster' });
  private readonly _banner = h('div', { class: 'tfd-banner', hidden: true });
  private readonly _form = h('form', { novalidate: true });
  private readonly _grid = h('div', { class: 'tfd-form' });
  private readonly _line = h('code', { class: 'tfd-line' });
  private readonly _said = h('div', { class: 'tfd-asked', hidden: true });
  private readonly _start: HTMLButtonElement;
  private readonly _retry: HTMLButtonElement;
  private readonly _inputs = new Map<string, { field: IField; input: Input }>();
  private readonly _end: () => void;
  private _kinds: IKinds | null = null;
  private _asking = false;
  private _failed = false;
  private _disposed = false;

  constructor(
    private readonly _link: Link,
    private readonly _actions: IActions,
    private readonly _onStarted: (name: string, said: string) => void
  ) {
    ensureStyle();
    this._start = h('button', { type: 'submit', class: 'tfd-button tfd-main' }, 'Start');
    this._retry = button('Ask again', 'ask the kernel what can be started', () => {
      this._failed = false;
      this._look();
    });
    this._retry.hidden = true;
    this._form.hidden = true;
    this._form.addEventListener('submit', event => {
      event.preventDefault();
      void this._submit();
    });
    this._form.addEventListener('input', () => this._preview());
    this._form.append(
      this._grid,
      h('div', { class: 'tfd-quiet' }, 'The same in a cell:'),
      this._line,
      h('div', { class: 'tfd-row' }, this._start)
    );
    this.node.append(this._banner, this._form, this._said, this._retry);
    this._end = _link.onChange(() => this._look());
    this._look();
  }

  dispose(): void {
    this._disposed = true;
    this._end();
    this.node.remove();
  }

  private _look(): void {
    const { readOnly } = this._actions;
    const words = readOnly
      ? 'This site is read-only: clusters are started by code in a notebook.'
      : this._trouble();
    setText(this._banner, words);
    show(this._banner, words !== '');
    show(this._form, !words && this._kinds !== null);
    show(this._retry, !words && this._failed);
    if (!words && !this._kinds && !this._asking && !this._failed) {
      void this._ask();
    }
  }

  private _trouble(): string {
    switch (this._link.state) {
      case 'ready':
        return '';
      case 'gone':
        return 'The kernel has ended, or tells nothing any more. Next: ask for the form again.';
      default:
        return linkTrouble(this._link) || 'Waiting for the kernel …';
    }
  }

  private async _ask(): Promise<void> {
    this._asking = true;
    this._say(this._waits('asked what can be started …'), 'quiet');
    try {
      this._kinds = (await this._link.command('kinds')) as IKinds;
      this._say('', 'quiet');
      if (!this._disposed) {
        this._build(this._kinds);
      }
    } catch (error) {
      this._failed = true;
      this._say(problemText(error), 'bad');
    } finally {
      this._asking = false;
      if (!this._disposed) {
        this._look();
      }
    }
  }

  private _build({ launchers, fields }: IKinds): void {
    const known = fields.some(field => field.name === 'launcher');
    const all: IField[] =
      known || !launchers.length
        ? fields
        : [
            { name: 'launcher', kind: 'choice', label: 'kind', default: launchers[0].name },
            ...fields
          ];
    for (const field of all) {
      const id = uniqueId();
      const choices =
        field.name === 'launcher' && !field.choices?.length
          ? launchers.map(({ name }) => name)
          : (field.choices ?? []);
      const input = inputOf(field, choices);
      input.id = id;
      const help = h('span', { class: 'tfd-help', id: `${id}-help` }, field.help ?? '');
      input.setAttribute('aria-describedby', help.id);
      if (field.name === 'launcher') {
        const explain = () => {
          const chosen = launchers.find(({ name }) => name === input.value);
          setText(help, chosen?.summary ?? field.help ?? '');
        };
        input.addEventListener('change', explain);
        explain();
      }
      this._inputs.set(field.name, { field, input });
      this._grid.append(h('label', { for: id }, field.label), h('div', {}, input, help));
    }
    this._preview();
  }

  /** What was chosen; what is empty is left to the kernel. */
  private _options(): Record<string, unknown> {
    const options: Record<string, unknown> = {};
    for (const [name, { field, input }] of this._inputs) {
      const value = valueOf(field, input);
      if (value !== null) {
        options[name] = value;
      }
    }
    return options;
  }

  private _preview(): void {
    setText(this._line, lineOf(this._kinds?.line ?? '', this._inputs));
  }

  private async _submit(): Promise<void> {
    const wrong = [...this._inputs.values()].find(({ input }) => !input.checkValidity());
    if (wrong) {
      wrong.input.reportValidity();
      return;
    }
    setBusy(this._start, true);
    this._say(this._waits('start: asked … the first cluster takes some seconds'), 'quiet');
    try {
      const done = (await this._link.command('start', { options: this._options() })) as IStarted;
      const verb = done.reused ? 'lives already and is used' : 'was started';
      const where = done.variable ? `; it is in the variable ${done.variable}` : '';
      const said = `The cluster ${done.cluster} ${verb}${where}.\nThe same in a cell: ${done.line}`;
      this._say(said, 'good');
      if (!this._disposed) {
        this._onStarted(done.cluster, said);
      }
    } catch (error) {
      this._say(problemText(error), 'bad');
    } finally {
      setBusy(this._start, false);
    }
  }

  private _waits(otherwise: string): string {
    const { beside, hint } = this._link.transport;
    return beside
      ? otherwise
      : `queued until the cell ends.${hint ? ` At once, in a terminal: ${hint}` : ''}`;
  }

  private _say(words: string, tone: 'quiet' | 'good' | 'bad'): void {
    this._said.className = `tfd-asked tfd-${tone}`;
    setText(this._said, words);
    show(this._said, words !== '');
    // The form may be taller than the panel that it is in.
    if (this._inputs.size && typeof this._said.scrollIntoView === 'function') {
      this._said.scrollIntoView({ block: 'nearest' });
    }
    if (tone !== 'quiet') {
      announce(words);
    }
  }
}

function inputOf(field: IField, choices: readonly string[]): Input {
  const start = field.default ?? '';
  switch (field.kind) {
    case 'choice': {
      const select = h('select', {}, ...choices.map(name => h('option', { value: name }, name)));
      select.value = String(start);
      return select;
    }
    case 'flag': {
      const box = h('input', { type: 'checkbox' });
      box.checked = start === true;
      return box;
    }
    case 'count':
      return h('input', { type: 'number', min: 0, max: 1024, step: 1, value: String(start) });
    case 'seconds':
    case 'hours':
      return h('input', { type: 'number', min: 0, step: 'any', value: String(start) });
    default:
      return h('input', { type: 'text', value: String(start), spellcheck: 'false' });
  }
}

/** What a field says, null where it says nothing. */
function valueOf(field: IField, input: Input): string | number | boolean | null {
  if (field.kind === 'flag') {
    return (input as HTMLInputElement).checked;
  }
  const words = input.value.trim();
  if (!words) {
    return null;
  }
  return ['count', 'seconds', 'hours'].includes(field.kind) ? Number(words) : words;
}

/** The line of the magic that does the same. */
function lineOf(
  line: string,
  inputs: ReadonlyMap<string, { field: IField; input: Input }>
): string {
  const words = [line];
  for (const [name, { field, input }] of inputs) {
    const value = valueOf(field, input);
    // Of tasks the magic starts none that it was not told of, whatever the form begins with.
    const usual = field.kind === 'count' ? 0 : (field.default ?? null);
    if (value === null || value === usual) {
      continue;
    }
    const option = `--${name.replace(/_/g, '-')}`;
    if (value === true) {
      words.push(option);
    } else if (value !== false) {
      words.push(`${option} ${quoted(String(value))}`);
    }
  }
  return words.join(' ');
}

function quoted(word: string): string {
  return /^[\w.,:/=@%+-]+$/.test(word) ? word : `'${word.replace(/'/g, `'"'"'`)}'`;
}
