// The closures of a coordinator as a grid: sorted, filtered, with details of one of them.

import { ClosureIndex, type IFilter, type SortColumn } from './closureIndex';
import { button, h, labelled, setText, show } from './dom';
import { counted, whole } from './figures';
import type { Link } from './link';
import { CLOSURE_STATES, type ICluster } from './protocol';
import { onTheme } from './theme';
import { ValueDetails } from './valueDetails';
import { GRID_COLUMNS, ValuesGrid } from './valuesGrid';
import { type IActions, View } from './view';
import { Wanted } from './wanted';

const ALL = '';

export class ValuesView extends View {
  private readonly _state = h('select');
  private readonly _worker = h('select');
  private readonly _function = h('select');
  private readonly _sort = h('select');
  private readonly _direction: HTMLButtonElement;
  private readonly _summary = h('span', { class: 'tfd-quiet tfd-wrap' });
  private readonly _host = h('div', { class: 'tfd-gridhost', role: 'group' });
  private readonly _index: ClosureIndex;
  private readonly _grid: ValuesGrid;
  private readonly _details: ValueDetails;
  private readonly _wanted: Wanted;
  private _selected: number | null = null;
  private _drawn = -1;

  constructor(link: Link, cluster: string, actions: IActions) {
    super(link, cluster, actions, 'tfd-values');
    this.node.setAttribute('aria-label', `closures of ${cluster}`);
    this._index = new ClosureIndex(link.closures(cluster));
    this._direction = button('▾', 'sort the other way round', () =>
      this._choose(this._index.sort, !this._index.descending)
    );
    this._direction.setAttribute('aria-label', 'sort the other way round');
    this._details = new ValueDetails(link, cluster, actions.readOnly, () => this._select(null));
    this._grid = new ValuesGrid(
      this._host,
      () => link.closures(cluster),
      this._index,
      column => this._choose(column, this._index.sort === column ? !this._index.descending : false),
      row => this._select(row === null ? null : link.closures(cluster).first + row)
    );
    this._wanted = new Wanted(link, cluster);
    const rechoose = () => this._choose(this._index.sort, this._index.descending);
    options(this._state, 'all', CLOSURE_STATES);
    options(this._worker, 'all', []);
    options(this._function, 'all', []);
    options(
      this._sort,
      null,
      GRID_COLUMNS.map(({ name }) => name)
    );
    for (const select of [this._state, this._worker, this._function]) {
      select.addEventListener('change', rechoose);
    }
    this._sort.addEventListener('change', () =>
      this._choose(this._sort.value as SortColumn, this._index.descending)
    );
    this.body.append(
      h(
        'div',
        { class: 'tfd-row' },
        labelled('State', this._state),
        labelled('Worker', this._worker),
        labelled('Function', this._function),
        labelled('Sort by', this._sort),
        this._direction,
        this._summary
      ),
      this._host,
      this._details.node
    );
    this.onDispose(() => {
      this._wanted.dispose();
      this._grid.dispose();
      this._details.dispose();
    });
    this.onDispose(onTheme(this.node, () => this._grid.paint()));
    this._choose('id', true);
    this.begin();
  }

  protected override seen(visible: boolean): void {
    this._wanted.set(visible);
    if (visible) {
      this._grid.paint();
    }
  }

  protected draw(seen: ICluster | undefined): void {
    const table = this.link.closures(this.cluster);
    if (table.version !== this._drawn) {
      this._drawn = table.version;
      if (this._index.update(table)) {
        this._grid.update(this._selectedRow(), false);
      }
      options(this._function, 'all', table.functions);
      this._showDetails();
    }
    options(this._worker, 'all', Object.keys(seen?.coordinator?.workers ?? {}));
    this._summarize(seen);
  }

  private _choose(column: SortColumn, descending: boolean): void {
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

  private _select(id: number | null): void {
    this._selected = id;
    this._grid.update(this._selectedRow(), false);
    this._showDetails();
  }

  /** The row of the table that is selected, null where there is none any more. */
  private _selectedRow(): number | null {
    const table = this.link.closures(this.cluster);
    const row = (this._selected ?? -1) - table.first;
    return this._selected !== null && row >= 0 && row < table.length ? row : null;
  }

  private _showDetails(): void {
    const row = this._selectedRow();
    this._details.show(
      row === null ? null : this._selected,
      row === null ? '' : this.link.closures(this.cluster).stateOf(row)
    );
  }

  private _summarize(seen: ICluster | undefined): void {
    const { length } = this.link.closures(this.cluster);
    const shown = this._index.length;
    const counts = counted(seen?.coordinator?.counts ?? {});
    const total = Object.values(seen?.coordinator?.counts ?? {}).reduce((sum, n) => sum + n, 0);
    const words = !total
      ? seen?.coordinator
        ? 'nothing was scheduled yet'
        : 'there is no coordinator'
      : shown >= total
        ? `${whole(total)}: ${counts}`
        : shown === length
          ? `the latest ${whole(shown)} of ${whole(total)}: ${counts}`
          : `${whole(shown)} of ${whole(total)} shown: ${counts}`;
    setText(this._summary, words);
    this._host.setAttribute('aria-label', `grid of closures; ${words}`);
    show(this._host, length > 0);
  }
}

/** Have a select offer these; what is chosen stays chosen. */
function options(select: HTMLSelectElement, all: string | null, names: readonly string[]): void {
  const wanted = all === null ? [...names] : [ALL, ...names];
  const have = [...select.options].map(option => option.value);
  if (have.join('\n') === wanted.join('\n') && have.length) {
    return;
  }
  const { value } = select;
  select.replaceChildren(
    ...wanted.map(name => h('option', { value: name }, name === ALL ? (all ?? '') : name))
  );
  if (wanted.includes(value)) {
    select.value = value;
  }
}
