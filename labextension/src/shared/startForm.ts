// The form that starts a cluster. The kernel sends its fields.

import { announce } from './announce';
import { problemText } from './statusLine';
import { button, h, setBusy, setText, show, uniqueId } from './dom';
import { ensureStyle } from './css';
import type { Link } from './link';
import { type IActions, type IView, linkProblem, pendingText } from './view';

export interface IField {
  name: string;
  kind: 'count' | 'flag' | 'text' | 'seconds' | 'hours' | 'choice';
  label: string;
  help?: string;
  default?: string | number | boolean | null;
  choices?: string[];
}

interface IFormContent {
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

/** Fields that are shown with the counts; the others are under Advanced. */
const BASIC = ['name', 'output'];

export class StartForm implements IView {
  readonly node = h('section', { class: 'tfd-live tfd-start', 'aria-label': 'Start a cluster' });
  private readonly _banner = h('div', { class: 'tfd-banner', hidden: true });
  private readonly _form = h('form', { novalidate: true });
  private readonly _grid = h('div', { class: 'tfd-form' });
  private readonly _advancedGrid = h('div', { class: 'tfd-form' });
  private readonly _advanced = h(
    'details',
    { hidden: true },
    h('summary', {}, 'Advanced'),
    this._advancedGrid
  );
  private readonly _line = h('code', { class: 'tfd-line' });
  private readonly _status = h('div', { class: 'tfd-status-line', hidden: true });
  private readonly _start: HTMLButtonElement;
  private readonly _retry: HTMLButtonElement;
  private readonly _inputs = new Map<string, { field: IField; input: Input }>();
  private readonly _end: () => void;
  private readonly _opener = document.activeElement;
  private _content: IFormContent | null = null;
  private _loading = false;
  private _failed = false;
  private _disposed = false;

  constructor(
    private readonly _link: Link,
    private readonly _actions: IActions,
    private readonly _onStarted: (name: string, message: string) => void,
    /** Closes a form that a button has opened. */
    private readonly _onClose?: () => void
  ) {
    ensureStyle();
    this._start = h('button', { type: 'submit', class: 'tfd-button tfd-main' }, 'Start');
    this._retry = button('Retry', 'Request the form from the kernel again', () => {
      this._failed = false;
      this._update();
    });
    this._retry.hidden = true;
    this._form.hidden = true;
    this._form.addEventListener('submit', event => {
      event.preventDefault();
      void this._submit();
    });
    this._form.addEventListener('input', () => this._preview());
    this._form.addEventListener('keydown', event => {
      if (event.key === 'Escape' && this._onClose) {
        event.stopPropagation();
        this._onClose();
      }
    });
    this._form.append(
      this._grid,
      this._advanced,
      h('div', { class: 'tfd-quiet' }, 'Equivalent code:'),
      this._line,
      h('div', { class: 'tfd-row tfd-footer' }, this._start)
    );
    this.node.append(this._banner, this._form, this._status, this._retry);
    this._end = _link.onChange(() => this._update());
    this._update();
  }

  dispose(): void {
    this._disposed = true;
    this._end();
    this.node.remove();
  }

  private _update(): void {
    const { readOnly } = this._actions;
    const banner = readOnly
      ? 'This site is read-only: clusters are started by code in a notebook.'
      : this._problem();
    setText(this._banner, banner);
    show(this._banner, banner !== '');
    show(this._form, !banner && this._content !== null);
    show(this._retry, !banner && this._failed);
    if (!banner && !this._content && !this._loading && !this._failed) {
      void this._load();
    }
  }

  private _problem(): string {
    switch (this._link.state) {
      case 'ready':
        return '';
      case 'ended':
        return 'The kernel has ended or does not respond. Next: open the form again.';
      default:
        return linkProblem(this._link) || 'Waiting for the kernel …';
    }
  }

  private async _load(): Promise<void> {
    this._loading = true;
    this._report(pendingText(this._link, 'Loading the form …'), 'quiet');
    try {
      this._content = (await this._link.command('launchers')) as IFormContent;
      this._report('', 'quiet');
      if (!this._disposed) {
        this._build(this._content);
      }
    } catch (error) {
      this._failed = true;
      this._report(problemText(error), 'bad');
    } finally {
      this._loading = false;
      if (!this._disposed) {
        this._update();
        this._focus();
      }
    }
  }

  /** Focus the first field of a form that a button has opened, unless the focus was moved. */
  private _focus(): void {
    if (this._onClose && [this._opener, document.body].includes(document.activeElement)) {
      this._grid.querySelector('input')?.focus();
    }
  }

  private _build({ launchers, fields }: IFormContent): void {
    for (const field of fields) {
      const id = uniqueId();
      const input = inputOf(field);
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
      const isBasic = field.kind === 'count' || BASIC.includes(field.name);
      const grid = isBasic ? this._grid : this._advancedGrid;
      grid.append(h('label', { for: id }, field.label), h('div', {}, input, help));
    }
    show(this._advanced, this._advancedGrid.hasChildNodes());
    this._preview();
  }

  /** Return the entered options; the kernel applies its defaults for empty fields. */
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
    setText(this._line, lineOf(this._content?.line ?? '', this._inputs));
  }

  /** Mark the form as invalid if all counts are 0. Such a cluster would only have a dispatcher. */
  private _requireTasks(): void {
    const counts = [...this._inputs.values()].filter(({ field }) => field.kind === 'count');
    const isEmpty = counts.every(({ input }) => !Number(input.value));
    const labels = counts.map(({ field }) => field.label).join(' or ');
    const text = `A cluster needs at least one task. Enter a number of ${labels}.`;
    counts[0]?.input.setCustomValidity(isEmpty ? text : '');
  }

  private async _submit(): Promise<void> {
    this._requireTasks();
    const wrong = [...this._inputs.values()].find(({ input }) => !input.checkValidity());
    if (wrong) {
      this._advanced.open ||= this._advanced.contains(wrong.input);
      wrong.input.reportValidity();
      return;
    }
    setBusy(this._start, true);
    this._report(
      pendingText(this._link, 'Starting … The first cluster takes a few seconds.'),
      'quiet'
    );
    try {
      const started = (await this._link.command('start', { options: this._options() })) as IStarted;
      const verb = started.reused ? 'is already running' : 'was started';
      const variable = started.variable ? ` Variable: ${started.variable}.` : '';
      const message = `Cluster ${started.cluster} ${verb}.${variable}\nEquivalent code: ${started.line}`;
      this._report(message, 'good');
      if (!this._disposed) {
        this._onStarted(started.cluster, message);
      }
    } catch (error) {
      this._report(problemText(error), 'bad');
    } finally {
      setBusy(this._start, false);
    }
  }

  private _report(text: string, tone: 'quiet' | 'good' | 'bad'): void {
    this._status.className = `tfd-status-line tfd-${tone}`;
    setText(this._status, text);
    show(this._status, text !== '');
    // The form may be taller than the panel.
    if (this._inputs.size && typeof this._status.scrollIntoView === 'function') {
      this._status.scrollIntoView({ block: 'nearest' });
    }
    if (tone !== 'quiet') {
      announce(text);
    }
  }
}

function inputOf(field: IField): Input {
  const start = field.default ?? '';
  switch (field.kind) {
    case 'choice': {
      const select = h(
        'select',
        {},
        ...(field.choices ?? []).map(name => h('option', { value: name }, name))
      );
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

/** Return the value of a field, null if it is empty. */
function valueOf(field: IField, input: Input): string | number | boolean | null {
  if (field.kind === 'flag') {
    return (input as HTMLInputElement).checked;
  }
  const text = input.value.trim();
  if (!text) {
    return null;
  }
  return ['count', 'seconds', 'hours'].includes(field.kind) ? Number(text) : text;
}

/** Return the equivalent line magic. */
function lineOf(
  line: string,
  inputs: ReadonlyMap<string, { field: IField; input: Input }>
): string {
  const parts = [line];
  for (const [name, { field, input }] of inputs) {
    const value = valueOf(field, input);
    // The magic starts no tasks by default, but the form has initial counts.
    const implied = field.kind === 'count' ? 0 : (field.default ?? null);
    if (value === null || value === implied) {
      continue;
    }
    const option = `--${name.replace(/_/g, '-')}`;
    if (value === true) {
      parts.push(option);
    } else if (value !== false) {
      parts.push(`${option} ${quoted(String(value))}`);
    }
  }
  return parts.join(' ');
}

function quoted(value: string): string {
  return /^[\w.,:/=@%+-]+$/.test(value) ? value : `'${value.replace(/'/g, `'"'"'`)}'`;
}
