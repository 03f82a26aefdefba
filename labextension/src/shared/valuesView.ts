// The closures of a coordinator in a sortable, filterable grid with details.

import { announce } from './announce';
import { ClosureIndex, type IFilter, type SortColumn } from './closureIndex';
import { button, h, labeled, setText, show } from './dom';
import { counted, formatInteger, total } from './figures';
import type { Link } from './link';
import { CLOSURE_STATES, type ICluster } from './protocol';
import { onTheme } from './theme';
import { closureText, nowOf } from './timelineModel';
import { ValueDetails } from './valueDetails';
import { GRID_COLUMNS, ValuesGrid } from './valuesGrid';
import { type IActions, View } from './view';
import { ClosureSubscription } from './subscription';

const ALL = '';
const FAILED = 'failed';

export class ValuesView extends View {
  private readonly _state = h('select');
  private readonly _worker = h('select');
  private readonly _function = h('select');
  private readonly _sort = h('select');
  private readonly _direction: HTMLButtonElement;
  private readonly _failed: HTMLButtonElement;
  private readonly _summary = h('span', { class: 'tfd-quiet tfd-wrap' });
  private readonly _host = h('div', { class: 'tfd-gridhost' });
  private readonly _index: ClosureIndex;
  private readonly _grid: ValuesGrid;
  private readonly _details: ValueDetails;
  private readonly _subscription: ClosureSubscription;
  /** The selected closure that the grid shows. */
  private _selected: number | null = null;
  private _detailsOpen = false;
  private _drawn = -1;

  constructor(link: Link, cluster: string, actions: IActions) {
    super(link, cluster, actions, 'tfd-values');
    this.node.setAttribute('aria-label', `closures of ${cluster}`);
    this._index = new ClosureIndex(link.closures(cluster));
    this._direction = button('▾', 'Reverse the sort order', () =>
      this._applySort(this._index.sort, !this._index.descending)
    );
    this._direction.setAttribute('aria-label', 'Reverse the sort order');
    this._failed = button('', 'Show only failed closures, or all', () => {
      this._state.value = this._state.value === FAILED ? ALL : FAILED;
      this._applySort(this._index.sort, this._index.descending);
    });
    this._failed.classList.add('tfd-bad');
    this._details = new ValueDetails(link, cluster, actions.readOnly, () => {
      this._openDetails(false);
      this._grid.focus();
    });
    this._grid = new ValuesGrid(
      this._host,
      () => link.closures(cluster),
      this._index,
      column =>
        this._applySort(column, this._index.sort === column ? !this._index.descending : false),
      (row, byKey) => this._select(row, byKey),
      () => {
        this._openDetails(this._selectedRow() !== null);
        this._details.node.focus();
      }
    );
    this._subscription = new ClosureSubscription(link, cluster);
    const applyFilter = () => this._applySort(this._index.sort, this._index.descending);
    setOptions(this._state, 'all', CLOSURE_STATES);
    setOptions(this._worker, 'all', []);
    setOptions(this._function, 'all', []);
    setOptions(
      this._sort,
      null,
      GRID_COLUMNS.map(({ name }) => name)
    );
    for (const select of [this._state, this._worker, this._function]) {
      select.addEventListener('change', applyFilter);
    }
    this._sort.addEventListener('change', () =>
      this._applySort(this._sort.value as SortColumn, this._index.descending)
    );
    this.body.append(
      h(
        'div',
        { class: 'tfd-row' },
        labeled('State', this._state),
        this._failed,
        labeled('Worker', this._worker),
        labeled('Function', this._function),
        labeled('Sort by', this._sort),
        this._direction,
        this._summary
      ),
      this._host,
      this._details.node
    );
    this.onDispose(() => {
      this._subscription.dispose();
      this._grid.dispose();
      this._details.dispose();
    });
    this.onDispose(onTheme(this.node, () => this._grid.paint()));
    this._applySort('id', true);
    this.begin();
  }

  protected override onVisibilityChange(visible: boolean): void {
    this._subscription.set(visible);
    if (visible) {
      this._grid.paint();
    }
  }

  protected draw(snapshot: ICluster | undefined): void {
    const table = this.link.closures(this.cluster);
    const selected = this.link.selectedClosure(this.cluster);
    const moved = selected !== this._selected;
    this._selected = selected;
    if (table.version !== this._drawn) {
      this._drawn = table.version;
      if (this._index.update(table)) {
        this._grid.update(this._selectedRow(), false);
      }
      setOptions(this._function, 'all', table.functions);
    }
    if (moved) {
      this._openDetails(this._detailsOpen && selected !== null);
      this._grid.update(this._selectedRow(), false);
      this._grid.scrollToSelected();
    }
    setOptions(this._worker, 'all', Object.keys(snapshot?.coordinator?.workers ?? {}));
    this._summarize(snapshot);
    this._showDetails();
  }

  private _applySort(column: SortColumn, descending: boolean): void {
    const table = this.link.closures(this.cluster);
    this._index.update(table);
    this._index.choose(column, descending, this._filter());
    this._sort.value = column;
    setText(this._direction, descending ? '▾' : '▴');
    this._grid.update(this._selectedRow(), true);
    this._grid.toTop();
    this._summarize(this.last);
  }

  private _filter(): IFilter {
    const { functions } = this.link.closures(this.cluster);
    const state = CLOSURE_STATES.findIndex(name => name === this._state.value);
    const name = functions.indexOf(this._function.value);
    return {
      state: state < 0 ? null : state,
      worker: this._worker.value === ALL ? null : Number(this._worker.value),
      function: name < 0 ? null : name
    };
  }

  private _select(row: number | null, byKey: boolean): void {
    const table = this.link.closures(this.cluster);
    this._selected = row === null ? null : table.first + row;
    this.link.selectClosure(this.cluster, this._selected);
    this._openDetails(row !== null && (this._detailsOpen || !byKey));
    if (row !== null && byKey) {
      announce(closureText(table, row, nowOf(table, this.connected)), true);
    }
  }

  private _openDetails(open: boolean): void {
    this._detailsOpen = open;
    this._showDetails();
  }

  /** Return the selected row of the table, null if it was dropped. */
  private _selectedRow(): number | null {
    const table = this.link.closures(this.cluster);
    const row = (this._selected ?? -1) - table.first;
    return this._selected !== null && row >= 0 && row < table.length ? row : null;
  }

  private _showDetails(): void {
    const row = this._detailsOpen ? this._selectedRow() : null;
    this._details.show(
      row === null ? null : this._selected,
      row === null ? '' : this.link.closures(this.cluster).stateOf(row)
    );
  }

  private _summarize(snapshot: ICluster | undefined): void {
    const { length } = this.link.closures(this.cluster);
    const shown = this._index.length;
    const counts = counted(snapshot?.coordinator?.counts ?? {});
    const all = total(snapshot?.coordinator?.counts ?? {});
    const summary = !all
      ? snapshot?.coordinator
        ? 'no closures scheduled yet'
        : 'no coordinator'
      : shown >= all
        ? `${formatInteger(all)}: ${counts}`
        : shown === length
          ? `latest ${formatInteger(shown)} of ${formatInteger(all)}: ${counts}`
          : `${formatInteger(shown)} of ${formatInteger(all)} shown: ${counts}`;
    setText(this._summary, summary);
    const failed = snapshot?.coordinator?.counts.failed ?? 0;
    const filtered = this._state.value === FAILED;
    setText(this._failed, `${formatInteger(failed)} failed`);
    this._failed.setAttribute('aria-pressed', String(filtered));
    show(this._failed, failed > 0 || filtered);
    this._grid.label =
      `grid of closures; ${summary}. ` +
      'Arrow keys select a row, Enter opens its details, Escape returns.';
    show(this._host, length > 0);
  }
}

/** Replace the options of a select and keep its value if possible. */
function setOptions(select: HTMLSelectElement, all: string | null, names: readonly string[]): void {
  const values = all === null ? [...names] : [ALL, ...names];
  const current = [...select.options].map(option => option.value);
  if (current.join('\n') === values.join('\n') && current.length) {
    return;
  }
  const { value } = select;
  select.replaceChildren(
    ...values.map(name => h('option', { value: name }, name === ALL ? (all ?? '') : name))
  );
  if (values.includes(value)) {
    select.value = value;
  }
}
