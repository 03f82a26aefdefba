// Finding a cluster: a choice of resolvers, the tasks that were found, and what can be done next.

import { announce } from './announce';
import { problemText, Teller } from './asker';
import { ensureStyle } from './css';
import { button, enable, h, labelled, setBusy, setText, show } from './dom';
import { brief, clean, signed, whole } from './figures';
import { FoundTasks, type ISighting, nameOf } from './foundTasks';
import type { Link } from './link';
import { type IActions, type IView, linkTrouble } from './view';

interface IConsidered {
  rule: string;
  outcome: string;
  why: string;
}

interface IChange {
  time: number;
  task: string;
  before: string;
  after: string;
  reason: string;
}

/** What the kernel saw: see `tfd_notebook/model/resolution.py`. */
export interface ILook {
  rule: string;
  place: string;
  tasks: ISighting[];
  counts: Record<string, number>;
  considered: IConsidered[];
  cell: string;
  seconds: number;
  /** The latest of `changed` changes. */
  changes: IChange[];
  changed: number;
  /** Of this table; an answer `since` it has only those of its tasks that changed. */
  number: number;
  since: number | null;
  trouble: string;
  /** Whether somebody knows the tasks; otherwise the cell is an offer. */
  found: boolean;
}

interface IChoices {
  choices: { name: string; summary: string }[];
  chosen?: string;
  options?: Record<string, unknown>;
}

interface IAttached {
  cluster: string;
  variable: string;
  said: string;
}

const WATCH_MS = 1000;

export class ResolveView implements IView {
  readonly node = h('section', { class: 'tfd-live tfd-resolve', 'aria-label': 'find a cluster' });
  private readonly _banner = h('div', { class: 'tfd-banner', hidden: true });
  private readonly _form = h('form', { class: 'tfd-row', novalidate: true, hidden: true });
  private readonly _choice = h('select', { 'aria-label': 'resolver' });
  private readonly _options = h('input', {
    type: 'text',
    spellcheck: 'false',
    placeholder: '{"port": 8470}',
    'aria-label': 'arguments of the resolver, as JSON'
  });
  private readonly _look = h('button', { type: 'submit', class: 'tfd-button tfd-main' }, 'Look');
  private readonly _watch = h('input', { type: 'checkbox' });
  private readonly _head = h('div', { class: 'tfd-wrap' });
  private readonly _rule = h('summary', { class: 'tfd-quiet' });
  private readonly _rules = h('dl', { class: 'tfd-facts' });
  private readonly _why = h('details', { hidden: true }, this._rule, this._rules);
  private readonly _trouble = h('div', { class: 'tfd-bad tfd-wrap', hidden: true });
  private readonly _tasks = new FoundTasks();
  private readonly _changed = h('summary', { class: 'tfd-quiet' });
  private readonly _changes = h('ol', { class: 'tfd-changes' });
  private readonly _history = h('details', { hidden: true }, this._changed, this._changes);
  private readonly _cell = h('pre', { class: 'tfd-cell' });
  private readonly _use: HTMLButtonElement;
  private readonly _insert: HTMLButtonElement;
  private readonly _next: HTMLElement;
  private readonly _teller = new Teller();
  private readonly _end: () => void;
  private _timer: ReturnType<typeof setTimeout> | null = null;
  private _known = false;
  private _asking = false;
  /** The kernel did not say what can be chosen: it is asked again when it is another one. */
  private _failed = false;
  private _seen: ILook | null = null;
  /** What the shown table was asked for. */
  private _asked: { resolver: string; options: Record<string, unknown> } | null = null;
  private _disposed = false;

  constructor(
    private readonly _link: Link,
    private readonly _actions: IActions,
    private readonly _onAttached: (cluster: string, said: string) => void
  ) {
    ensureStyle();
    this._use = button(
      'Use as cluster',
      'watch these tasks as a cluster of this kernel',
      () => void this._attach()
    );
    this._insert = button('Insert cell', 'put this into a cell of the notebook', () =>
      this._actions.insert?.(this._seen?.cell ?? '')
    );
    this._next = h(
      'div',
      { hidden: true },
      h('div', { class: 'tfd-quiet' }, 'The next cell:'),
      this._cell,
      h('div', { class: 'tfd-row' }, this._use, this._insert)
    );
    this._form.append(
      this._choice,
      this._options,
      this._look,
      labelled('watch', this._watch, 'look again every second')
    );
    this._form.addEventListener('submit', event => {
      event.preventDefault();
      void this._ask(false);
    });
    this._watch.addEventListener('change', () => this._schedule());
    this._choice.addEventListener('change', () => this._explain());
    this.node.append(
      this._banner,
      this._form,
      this._teller.node,
      this._head,
      this._why,
      this._trouble,
      this._tasks.node,
      this._history,
      this._next
    );
    this._tasks.show([]);
    this._end = _link.onChange(() => this._update());
    this._update();
  }

  dispose(): void {
    this._disposed = true;
    this._stop();
    this._teller.dispose();
    this._end();
    this.node.remove();
  }

  private _update(): void {
    const ready = this._link.state === 'ready';
    const words = linkTrouble(this._link) || (ready ? '' : 'Waiting for the kernel …');
    setText(this._banner, words);
    show(this._banner, words !== '');
    show(this._form, this._known);
    enable(this._look, ready && !this._asking);
    enable(this._use, ready && !this._actions.readOnly);
    this._failed &&= ready;
    if (ready && !this._known && !this._asking && !this._failed) {
      void this._begin();
    }
  }

  /** Ask what can be chosen, and look at once. */
  private async _begin(): Promise<void> {
    this._asking = true;
    try {
      const { choices, chosen, options } = (await this._link.command('resolvers')) as IChoices;
      if (this._disposed) {
        return;
      }
      const names = new Set(choices.map(({ name }) => name));
      const all =
        chosen && !names.has(chosen) ? [...choices, { name: chosen, summary: '' }] : choices;
      this._choice.replaceChildren(
        ...all.map(({ name, summary }) => h('option', { value: name, title: summary }, name))
      );
      this._choice.value = chosen ?? choices[0].name;
      this._options.value = options && Object.keys(options).length ? JSON.stringify(options) : '';
      this._known = true;
      this._explain();
    } catch (error) {
      this._failed = true;
      this._teller.say(problemText(error), 'bad');
      return;
    } finally {
      this._asking = false;
    }
    this._update();
    await this._ask(false);
  }

  private async _ask(again: boolean): Promise<void> {
    if (this._asking || this._disposed) {
      return;
    }
    const wanted = again ? this._asked : this._wanted();
    if (!wanted) {
      return;
    }
    this._stop();
    this._asking = true;
    setBusy(this._look, true);
    const { beside, hint } = this._link.transport;
    if (!again) {
      const waits = `queued until the cell ends.${hint ? ` At once, in a terminal: ${hint}` : ''}`;
      this._teller.say(beside ? 'looking …' : waits, 'quiet');
    }
    try {
      const since = again ? this._seen?.number : undefined;
      const told = await this._link.command('resolve', { ...wanted, again, since });
      if (!this._disposed) {
        this._asked = wanted;
        this._show(completed(told as ILook, this._seen), again);
      }
    } catch (error) {
      if (!this._disposed) {
        this._teller.say(problemText(error), 'bad');
        this._watch.checked = false;
        if (!again) {
          this._forget();
        }
      }
    } finally {
      this._asking = false;
      setBusy(this._look, false);
      if (!this._disposed) {
        this._update();
        this._schedule();
      }
    }
  }

  /** What was chosen; null, with a word about it, where it cannot be meant. */
  private _wanted(): { resolver: string; options: Record<string, unknown> } | null {
    const text = this._options.value.trim();
    try {
      const options: unknown = text ? JSON.parse(text) : {};
      if (options !== null && typeof options === 'object' && !Array.isArray(options)) {
        return { resolver: this._choice.value, options: options as Record<string, unknown> };
      }
    } catch {
      // said below
    }
    this._teller.say(`These arguments are no JSON object. Next: write {"port": 8470}`, 'bad');
    return null;
  }

  /** Show nothing of what was asked before: it is no answer. */
  private _forget(): void {
    this._seen = this._asked = null;
    setText(this._head, '');
    this._tasks.show([]);
    for (const part of [this._why, this._trouble, this._history, this._next]) {
      show(part, false);
    }
  }

  private _show(look: ILook, again: boolean): void {
    const before = this._seen;
    this._seen = look;
    this._teller.node.hidden = true;
    setText(this._head, headOf(look));
    const fired = look.considered.at(-1);
    show(this._why, fired !== undefined);
    setText(this._rule, fired ? `rule ${fired.rule}: ${clean(fired.why)}` : '');
    this._rules.replaceChildren(
      ...look.considered.flatMap(({ rule, outcome, why }) => [
        h('dt', { class: outcome === 'close' ? 'tfd-warn' : null }, `${rule}: ${outcome}`),
        h('dd', {}, clean(why))
      ])
    );
    setText(this._trouble, clean(look.trouble));
    show(this._trouble, look.trouble !== '');
    this._tasks.show(look.tasks);
    this._showChanges(look);
    setText(this._cell, look.cell);
    show(this._next, look.cell !== '');
    show(this._use, look.found && !this._actions.readOnly);
    show(this._insert, this._actions.insert !== undefined && !this._actions.readOnly);
    if (!again || headOf(look, false) !== (before && headOf(before, false))) {
      announce(headOf(look, false));
    }
  }

  private _showChanges({ changes, changed }: ILook): void {
    show(this._history, changed > 0);
    const many = changed === 1 ? 'change' : 'changes';
    setText(this._changed, `${whole(changed)} ${many}, the latest first`);
    this._changes.replaceChildren(
      ...[...changes].reverse().map(({ time, task, before, after, reason }) => {
        const at = new Date(time * 1000).toLocaleTimeString();
        const why = reason ? ` (${clean(reason)})` : '';
        const was = before ? signed(before) : 'new';
        return h('li', {}, `${at}  ${task}: ${was} → ${after ? signed(after) : 'gone'}${why}`);
      })
    );
  }

  private _explain(): void {
    this._choice.title = this._choice.selectedOptions[0]?.title ?? '';
  }

  private async _attach(): Promise<void> {
    const wanted = this._asked;
    if (!wanted) {
      return;
    }
    const done = await this._teller.attempt(
      'use as cluster',
      async () => (await this._link.command('attach', wanted)) as IAttached,
      [this._use],
      ({ said }) => said
    );
    if (done && !this._disposed) {
      this._onAttached(done.cluster, done.said);
    }
  }

  /** Look again in a second, if that is wished and somebody can see it. */
  private _schedule(): void {
    this._stop();
    if (this._watch.checked && this._seen?.found && !this._disposed) {
      this._timer = setTimeout(() => {
        if (document.hidden || this._link.state !== 'ready') {
          this._schedule();
        } else {
          void this._ask(true);
        }
      }, WATCH_MS);
    }
  }

  private _stop(): void {
    if (this._timer !== null) {
      clearTimeout(this._timer);
      this._timer = null;
    }
  }
}

/** Return what was told with the tasks that it leaves out, which are as they were. */
function completed(told: ILook, before: ILook | null): ILook {
  if (told.since === null || before === null) {
    return told;
  }
  const changed = new Map(told.tasks.map(task => [nameOf(task), task]));
  return { ...told, tasks: before.tasks.map(task => changed.get(nameOf(task)) ?? task) };
}

function headOf(look: ILook, timed = true): string {
  if (!look.found) {
    return 'no cluster yet';
  }
  const states = Object.entries(look.counts).map(([state, count]) => `${whole(count)} ${state}`);
  const many = look.tasks.length === 1 ? 'task' : 'tasks';
  const counts = states.length
    ? `${whole(look.tasks.length)} ${many}: ${states.join(', ')}`
    : 'no tasks';
  return `${clean(look.place)}, ${counts}${timed ? `; seen in ${brief(look.seconds)}` : ''}`;
}
