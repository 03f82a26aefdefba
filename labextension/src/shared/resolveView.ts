// Resolving a cluster: a choice of resolvers, the resolved tasks and the code of the next step.

import { announce } from './announce';
import { problemText, StatusLine } from './statusLine';
import { ensureStyle } from './css';
import { button, enable, h, labeled, setBusy, setText, show } from './dom';
import { brief, clean, plural, signed, formatInteger } from './figures';
import type { Link } from './link';
import { ResolvedTasks, type ITaskStatus } from './resolvedTasks';
import { type IActions, type IView, linkProblem, pendingText } from './view';

interface IRuleResult {
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

/** The result of a resolution; see `tfd_notebook/model/resolution.py`. */
export interface IResolution {
  rule: string;
  place: string;
  tasks: ITaskStatus[];
  counts: Record<string, number>;
  considered: IRuleResult[];
  cell: string;
  seconds: number;
  /** The latest changes; `changed` is their total number. */
  changes: IChange[];
  changed: number;
  trouble: string;
  /** Whether a cluster was found; otherwise `cell` suggests how to start one. */
  resolved: boolean;
}

interface IChoices {
  choices: { name: string; summary: string }[];
  chosen?: string;
  options?: Record<string, unknown>;
}

interface IAttached {
  cluster: string;
  variable: string;
  message: string;
}

const WATCH_MS = 1000;

export class ResolveView implements IView {
  readonly node = h('section', { class: 'tfd-live tfd-resolve', 'aria-label': 'Find a cluster' });
  private readonly _banner = h('div', { class: 'tfd-banner', hidden: true });
  private readonly _form = h('form', { class: 'tfd-row', novalidate: true, hidden: true });
  private readonly _choice = h('select', { 'aria-label': 'resolver' });
  private readonly _options = h('input', {
    type: 'text',
    spellcheck: 'false',
    placeholder: '{"port": 8470}',
    'aria-label': 'arguments of the resolver, as JSON'
  });
  private readonly _resolve = h(
    'button',
    { type: 'submit', class: 'tfd-button tfd-main' },
    'Resolve'
  );
  private readonly _watch = h('input', { type: 'checkbox' });
  private readonly _head = h('div', { class: 'tfd-wrap' });
  private readonly _rule = h('summary', { class: 'tfd-quiet' });
  private readonly _rules = h('dl', { class: 'tfd-facts' });
  private readonly _why = h('details', { hidden: true }, this._rule, this._rules);
  private readonly _error = h('div', { class: 'tfd-bad tfd-wrap', hidden: true });
  private readonly _tasks = new ResolvedTasks();
  private readonly _changed = h('summary', { class: 'tfd-quiet' });
  private readonly _changes = h('ol', { class: 'tfd-changes' });
  private readonly _history = h('details', { hidden: true }, this._changed, this._changes);
  private readonly _cell = h('pre', { class: 'tfd-cell' });
  private readonly _use: HTMLButtonElement;
  private readonly _insert: HTMLButtonElement;
  private readonly _next: HTMLElement;
  private readonly _status = new StatusLine();
  private readonly _end: () => void;
  private _timer: ReturnType<typeof setTimeout> | null = null;
  private _ready = false;
  private _pending = false;
  /** The list of resolvers could not be loaded; it is requested again after a kernel restart. */
  private _failed = false;
  private _current: IResolution | null = null;
  /** Resolver and options of the shown table. */
  private _query: { resolver: string; options: Record<string, unknown> } | null = null;
  private _disposed = false;

  constructor(
    private readonly _link: Link,
    private readonly _actions: IActions,
    private readonly _onAttached: (cluster: string, message: string) => void
  ) {
    ensureStyle();
    this._use = button(
      'Use as cluster',
      'Monitor these tasks as a cluster of this kernel',
      () => void this._attach()
    );
    this._insert = button('Insert cell', 'Insert this code into a cell of the notebook', () =>
      this._actions.insert?.(this._current?.cell ?? '')
    );
    this._next = h(
      'div',
      { hidden: true },
      h('div', { class: 'tfd-quiet' }, 'Code for the next cell:'),
      this._cell,
      h('div', { class: 'tfd-row' }, this._use, this._insert)
    );
    this._form.append(
      this._choice,
      this._options,
      this._resolve,
      labeled('Watch', this._watch, 'Update every second')
    );
    this._form.addEventListener('submit', event => {
      event.preventDefault();
      void this._load(false);
    });
    this._watch.addEventListener('change', () => this._schedule());
    this._choice.addEventListener('change', () => this._explain());
    this.node.append(
      this._banner,
      this._form,
      this._status.node,
      this._head,
      this._why,
      this._error,
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
    this._status.dispose();
    this._end();
    this.node.remove();
  }

  private _update(): void {
    const ready = this._link.state === 'ready';
    const banner = linkProblem(this._link) || (ready ? '' : 'Waiting for the kernel …');
    setText(this._banner, banner);
    show(this._banner, banner !== '');
    show(this._form, this._ready);
    enable(this._resolve, ready && !this._pending);
    enable(this._use, ready && !this._actions.readOnly);
    this._failed &&= ready;
    if (ready && !this._ready && !this._pending && !this._failed) {
      void this._begin();
    }
  }

  /** Load the list of resolvers, then resolve. */
  private async _begin(): Promise<void> {
    this._pending = true;
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
      this._ready = true;
      this._explain();
    } catch (error) {
      this._failed = true;
      this._status.report(problemText(error), 'bad');
      return;
    } finally {
      this._pending = false;
    }
    this._update();
    await this._load(false);
  }

  private async _load(probe: boolean): Promise<void> {
    if (this._pending || this._disposed) {
      return;
    }
    const query = probe ? this._query : this._readForm();
    if (!query) {
      return;
    }
    this._stop();
    this._pending = true;
    setBusy(this._resolve, true);
    if (!probe) {
      this._status.report(pendingText(this._link, 'Resolving …'), 'quiet');
    }
    try {
      const reply = (await this._link.command('resolve', { ...query, probe })) as IResolution;
      if (!this._disposed) {
        this._query = query;
        this._show(reply, probe);
      }
    } catch (error) {
      if (!this._disposed) {
        this._status.report(problemText(error), 'bad');
        this._watch.checked = false;
        if (!probe) {
          this._clear();
        }
      }
    } finally {
      this._pending = false;
      setBusy(this._resolve, false);
      if (!this._disposed) {
        this._update();
        this._schedule();
      }
    }
  }

  /** Return resolver and options; null, with an error message, if the options are invalid. */
  private _readForm(): { resolver: string; options: Record<string, unknown> } | null {
    const text = this._options.value.trim();
    try {
      const options: unknown = text ? JSON.parse(text) : {};
      if (options !== null && typeof options === 'object' && !Array.isArray(options)) {
        return { resolver: this._choice.value, options: options as Record<string, unknown> };
      }
    } catch {
      // reported below
    }
    this._status.report(
      'Invalid arguments: expected a JSON object. Next: enter, for example, {"port": 8470}',
      'bad'
    );
    return null;
  }

  /** Clear the previous result. */
  private _clear(): void {
    this._current = this._query = null;
    setText(this._head, '');
    this._tasks.show([]);
    for (const part of [this._why, this._error, this._history, this._next]) {
      show(part, false);
    }
  }

  private _show(resolution: IResolution, probe: boolean): void {
    const before = this._current;
    this._current = resolution;
    this._status.node.hidden = true;
    setText(this._head, headOf(resolution));
    const fired = resolution.considered.at(-1);
    show(this._why, fired !== undefined);
    setText(this._rule, fired ? `rule ${fired.rule}: ${clean(fired.why)}` : '');
    this._rules.replaceChildren(
      ...resolution.considered.flatMap(({ rule, outcome, why }) => [
        h('dt', { class: outcome === 'partial' ? 'tfd-warn' : null }, `${rule}: ${outcome}`),
        h('dd', {}, clean(why))
      ])
    );
    setText(this._error, clean(resolution.trouble));
    show(this._error, resolution.trouble !== '');
    this._tasks.show(resolution.tasks);
    this._showChanges(resolution);
    setText(this._cell, resolution.cell);
    show(this._next, resolution.cell !== '');
    show(this._use, resolution.resolved && !this._actions.readOnly);
    show(this._insert, this._actions.insert !== undefined && !this._actions.readOnly);
    if (!probe || headOf(resolution, false) !== (before && headOf(before, false))) {
      announce(headOf(resolution, false));
    }
  }

  private _showChanges({ changes, changed }: IResolution): void {
    show(this._history, changed > 0);
    setText(this._changed, `${plural(changed, 'change')}, newest first`);
    this._changes.replaceChildren(
      ...[...changes].reverse().map(({ time, task, before, after, reason }) => {
        const at = new Date(time * 1000).toLocaleTimeString();
        const why = reason ? ` (${clean(reason)})` : '';
        const previous = before ? signed(before) : 'new';
        return h(
          'li',
          {},
          `${at}  ${task}: ${previous} → ${after ? signed(after) : 'removed'}${why}`
        );
      })
    );
  }

  private _explain(): void {
    this._choice.title = this._choice.selectedOptions[0]?.title ?? '';
  }

  private async _attach(): Promise<void> {
    const query = this._query;
    if (!query) {
      return;
    }
    const attached = await this._status.attempt(
      'Use as cluster',
      async () => (await this._link.command('attach', query)) as IAttached,
      [this._use],
      ({ message }) => message
    );
    if (attached && !this._disposed) {
      this._onAttached(attached.cluster, attached.message);
    }
  }

  /** Schedule the next update if watching is enabled. */
  private _schedule(): void {
    this._stop();
    if (this._watch.checked && this._current?.resolved && !this._disposed) {
      this._timer = setTimeout(() => {
        if (document.hidden || this._link.state !== 'ready') {
          this._schedule();
        } else {
          void this._load(true);
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

function headOf(resolution: IResolution, timed = true): string {
  if (!resolution.resolved) {
    return 'no cluster yet';
  }
  const states = Object.entries(resolution.counts).map(
    ([state, count]) => `${formatInteger(count)} ${state}`
  );
  const counts = states.length
    ? `${plural(resolution.tasks.length, 'task')}: ${states.join(', ')}`
    : 'no tasks';
  return `${clean(resolution.place)}, ${counts}${timed ? `; resolved in ${brief(resolution.seconds)}` : ''}`;
}
