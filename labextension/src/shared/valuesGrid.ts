// The grid of closures: a data model over the index, and a DataGrid in the colors of the theme.

import {
  BasicKeyHandler,
  BasicMouseHandler,
  BasicSelectionModel,
  type CellRenderer,
  DataGrid,
  DataModel,
  GraphicsContext,
  TextRenderer
} from '@lumino/datagrid';
import { MessageLoop } from '@lumino/messaging';
import { Widget } from '@lumino/widgets';

import type { ClosureIndex, SortColumn } from './closureIndex';
import type { ClosureTable } from './closures';
import { brief, clock, errorSummary, sign, tone } from './figures';
import { colors } from './theme';

interface IColumn {
  name: SortColumn;
  width: number;
  right?: boolean;
}

export const GRID_COLUMNS: readonly IColumn[] = [
  { name: 'id', width: 76, right: true },
  { name: 'function', width: 130 },
  { name: 'state', width: 100 },
  { name: 'error', width: 120 },
  { name: 'worker', width: 62, right: true },
  { name: 'attempts', width: 74, right: true },
  { name: 'waited', width: 72, right: true },
  { name: 'ran', width: 72, right: true },
  { name: 'fetched', width: 72, right: true },
  { name: 'queued', width: 78 }
];
const EDGE = 5;
const SCROLLBAR = 14;

/** Return the widths of the columns: the error has the rest of a wide grid. */
export function columnWidths(total: number): number[] {
  const widths = GRID_COLUMNS.map(({ name, width }) =>
    name === 'function' ? Math.max(70, Math.min(width, Math.round(total * 0.16))) : width
  );
  const rest = total - SCROLLBAR - widths.reduce((sum, width) => sum + width, 0);
  return GRID_COLUMNS.map(({ name }, i) => widths[i] + (name === 'error' ? Math.max(0, rest) : 0));
}

export class ClosureModel extends DataModel {
  private _rows = 0;
  /** The texts of the visible rows at the last update. */
  private _texts = new Map<number, string>();

  constructor(
    private readonly _table: () => ClosureTable,
    private readonly _index: ClosureIndex
  ) {
    super();
  }

  override rowCount(region: DataModel.RowRegion): number {
    return region === 'body' ? this._rows : 1;
  }

  override columnCount(region: DataModel.ColumnRegion): number {
    return region === 'body' ? GRID_COLUMNS.length : 0;
  }

  override data(region: DataModel.CellRegion, row: number, column: number): string {
    const { name } = GRID_COLUMNS[column];
    if (region !== 'body') {
      const arrow = this._index.descending ? ' ▾' : ' ▴';
      return name + (this._index.sort === name ? arrow : '');
    }
    return row < this._index.length ? cellText(this._table(), this._index.rows[row], name) : '';
  }

  /** Notify the grid of an updated index; `first` to `last` are the visible rows. */
  updated(first: number, last: number): void {
    const before = this._rows;
    const now = this._index.length;
    this._rows = now;
    if (now > before) {
      this.emitChanged({
        type: 'rows-inserted',
        region: 'body',
        index: before,
        span: now - before
      });
    } else if (now < before) {
      this.emitChanged({ type: 'rows-removed', region: 'body', index: now, span: before - now });
    }
    this._markChanged(first, Math.min(last, now - 1));
  }

  /** Notify the grid of changed rows, so that it draws no others. */
  private _markChanged(first: number, last: number): void {
    const texts = new Map<number, string>();
    const changed: number[] = [];
    for (let row = first; row <= last; row++) {
      const text = GRID_COLUMNS.map((_, column) => this.data('body', row, column)).join('\n');
      if (text !== this._texts.get(row)) {
        changed.push(row);
      }
      texts.set(row, text);
    }
    this._texts = texts;
    if (changed.length) {
      this.emitChanged({
        type: 'cells-changed',
        region: 'body',
        row: changed[0],
        column: 0,
        rowSpan: changed[changed.length - 1] - changed[0] + 1,
        columnSpan: GRID_COLUMNS.length
      });
    }
  }

  /** Notify the grid of a changed sort order. */
  sorted(): void {
    this.emitChanged({
      type: 'cells-changed',
      region: 'column-header',
      row: 0,
      column: 0,
      rowSpan: 1,
      columnSpan: GRID_COLUMNS.length
    });
  }
}

/** Return the text of a cell. */
export function cellText(table: ClosureTable, row: number, column: SortColumn): string {
  switch (column) {
    case 'id':
      return String(table.first + row);
    case 'function':
      return table.functionOf(row);
    case 'state':
      return `${sign(table.stateOf(row))} ${table.stateOf(row)}`;
    case 'worker':
      return table.worker[row] < 0 ? '' : String(table.worker[row]);
    case 'attempts':
      return table.attempts[row] > 1 ? String(table.attempts[row]) : '';
    case 'waited':
      return brief(table.dispatched[row] - table.queued[row]);
    case 'ran':
      return brief(table.ranOf(row));
    case 'fetched':
      return brief(table.finished[row] - table.fetching[row]);
    case 'queued':
      return Number.isNaN(table.queued[row]) ? '' : clock(table.queued[row]);
    case 'error':
      return errorSummary(table.errorOf(row));
  }
}

/** Selects rows, and reports clicks on column headers. */
class MouseHandler extends BasicMouseHandler {
  constructor(private readonly _clicked: (column: number) => void) {
    super();
  }

  override onMouseDown(grid: DataGrid, event: MouseEvent): void {
    const hit = grid.hitTest(event.clientX, event.clientY);
    const inside = hit.x > EDGE && hit.width - hit.x > EDGE; // the edges resize the column
    if (hit.region === 'column-header' && inside) {
      this._clicked(hit.column);
    } else {
      super.onMouseDown(grid, event);
    }
  }
}

/** Moves the selected row. */
class KeyHandler extends BasicKeyHandler {
  constructor(
    private readonly _onOpen: () => void,
    private readonly _whileMoving: (move: () => void) => void
  ) {
    super();
  }

  override onKeyDown(grid: DataGrid, event: KeyboardEvent): void {
    if (event.key === 'Enter') {
      event.preventDefault();
      event.stopPropagation();
      this._onOpen();
    } else if (event.key !== 'Tab') {
      // BasicKeyHandler keeps the focus in the grid when Tab is pressed.
      this._whileMoving(() => super.onKeyDown(grid, event));
    }
  }
}

/** Draws cells directly on the canvas of the grid; see `drawDirectly`. */
class DirectRenderer extends TextRenderer {
  constructor(
    private readonly _grid: DataGrid,
    private readonly _background: string,
    options: TextRenderer.IOptions
  ) {
    super(options);
  }

  override paint(_gc: GraphicsContext, config: CellRenderer.CellConfig): void {
    const context = this._grid.viewport.node.querySelector('canvas')?.getContext('2d');
    if (!context) {
      return;
    }
    const top = config.region === 'body' ? this._grid.headerHeight : 0;
    const y = Math.max(config.y, top);
    const height = config.y + config.height - 1 - y;
    context.save();
    context.beginPath();
    context.rect(config.x, y, config.width - 1, height);
    context.clip();
    context.fillStyle = this._background;
    context.fillRect(config.x, y, config.width - 1, height);
    const gc = new GraphicsContext(context);
    super.paint(gc, config);
    gc.dispose();
    context.restore();
  }
}

/**
 * Disable the copies of single cells in the grid.
 *
 * DataGrid draws each cell on a buffer canvas and copies it with drawImage. Without hardware
 * acceleration, Chromium copies the whole buffer for every cell, which takes 1.5 ms per cell.
 */
function drawDirectly(grid: DataGrid): void {
  const context = grid.viewport.node.querySelector('canvas')?.getContext('2d');
  if (context) {
    const draw = CanvasRenderingContext2D.prototype.drawImage as (...args: unknown[]) => void;
    context.drawImage = (...args: unknown[]) => {
      // Scrolling copies within the canvas, and a resize copies the whole canvas.
      if (args[0] === context.canvas || args.length < 9) {
        draw.apply(context, args);
      }
    };
  }
}

export class ValuesGrid {
  private readonly _grid: DataGrid;
  private readonly _model: ClosureModel;
  private readonly _selection: BasicSelectionModel;
  private readonly _sizes: ResizeObserver | null;
  private _updating = false;
  private _byKey = false;
  /** Width of the grid when the column widths were computed. */
  private _width = 0;

  constructor(
    private readonly _host: HTMLElement,
    private readonly _table: () => ClosureTable,
    private readonly _index: ClosureIndex,
    onSort: (column: SortColumn) => void,
    /** Called with the row that the user has selected, and whether by keyboard. */
    onSelect: (row: number | null, byKey: boolean) => void,
    /** Called when the user presses Enter. */
    onOpen: () => void
  ) {
    this._model = new ClosureModel(_table, _index);
    this._selection = new BasicSelectionModel({
      dataModel: this._model,
      selectionMode: 'row'
    });
    this._grid = new DataGrid({
      headerVisibility: 'column',
      stretchLastColumn: true,
      minimumSizes: { rowHeight: 18, columnWidth: 30, rowHeaderWidth: 0, columnHeaderHeight: 18 },
      defaultSizes: { rowHeight: 20, columnWidth: 80, rowHeaderWidth: 0, columnHeaderHeight: 22 }
    });
    drawDirectly(this._grid);
    this._grid.dataModel = this._model;
    this._grid.selectionModel = this._selection;
    this._grid.viewport.node.tabIndex = 0;
    // With this role, screen readers pass the arrow keys to the page.
    this._grid.viewport.node.setAttribute('role', 'application');
    this._grid.keyHandler = new KeyHandler(onOpen, move => {
      this._byKey = true;
      move();
      this._byKey = false;
    });
    this._grid.mouseHandler = new MouseHandler(column => onSort(GRID_COLUMNS[column].name));
    this._selection.changed.connect(() => {
      if (!this._updating) {
        const position = this._selection.cursorRow;
        const row = position >= 0 && position < _index.length ? _index.rows[position] : null;
        onSelect(row, this._byKey);
      }
    });
    this._sizes =
      typeof ResizeObserver === 'undefined' ? null : new ResizeObserver(() => this._attach());
    this._sizes?.observe(_host);
  }

  /** Show the rows of the index and select the row `selected`. */
  update(selected: number | null, sorted: boolean): void {
    this._updating = true;
    const { scrollY, pageHeight, bodyHeight } = this._grid;
    const last = this._grid.rowAt('body', Math.min(scrollY + pageHeight, bodyHeight) - 1);
    this._model.updated(Math.max(this._grid.rowAt('body', scrollY), 0), last);
    if (sorted) {
      this._model.sorted();
    }
    const position = selected === null ? -1 : this._index.positionOf(selected);
    if (position < 0) {
      this._selection.clear();
    } else if (position !== this._selection.cursorRow) {
      this._selection.select({
        r1: position,
        r2: position,
        c1: 0,
        c2: GRID_COLUMNS.length - 1,
        cursorRow: position,
        cursorColumn: 0,
        clear: 'all'
      });
    }
    this._updating = false;
  }

  set label(text: string) {
    this._grid.viewport.node.setAttribute('aria-label', text);
  }

  focus(): void {
    this._grid.viewport.node.focus({ preventScroll: true });
  }

  scrollToSelected(): void {
    if (this._selection.cursorRow >= 0) {
      this._grid.scrollToRow(this._selection.cursorRow);
    }
  }

  toTop(): void {
    this._grid.scrollTo(this._grid.scrollX, 0);
  }

  /** Redraw with the current theme. */
  paint(): void {
    const theme = colors(this._host);
    const font = `12px ${theme.font}`;
    this._grid.style = {
      ...DataGrid.defaultStyle,
      voidColor: theme.back,
      backgroundColor: theme.back,
      gridLineColor: theme.line,
      verticalGridLineColor: 'transparent',
      horizontalGridLineColor: theme.dark ? 'rgba(255,255,255,.1)' : 'rgba(0,0,0,.08)',
      headerBackgroundColor: theme.raised,
      headerGridLineColor: theme.line,
      headerVerticalGridLineColor: theme.dark ? 'rgba(255,255,255,.2)' : 'rgba(0,0,0,.15)',
      selectionFillColor: theme.dark ? 'rgba(93,178,242,.28)' : 'rgba(11,107,184,.16)',
      selectionBorderColor: theme.accent,
      cursorFillColor: 'transparent',
      cursorBorderColor: 'transparent',
      headerSelectionFillColor: 'transparent',
      headerSelectionBorderColor: 'transparent'
    };
    const align = ({ column }: CellRenderer.CellConfig) =>
      GRID_COLUMNS[column].right ? 'right' : 'left';
    const toneColors: Record<string, string> = {
      good: theme.text,
      quiet: theme.text,
      warn: theme.warn,
      bad: theme.bad
    };
    const body = new DirectRenderer(this._grid, theme.back, {
      font,
      horizontalAlignment: align,
      elideDirection: 'right',
      textColor: ({ row, column }: CellRenderer.CellConfig) => {
        const { name } = GRID_COLUMNS[column];
        const at = this._index.rows[row];
        return name === 'state'
          ? toneColors[tone(this._table().stateOf(at))]
          : name === 'error'
            ? theme.bad
            : theme.text;
      }
    });
    const head = new DirectRenderer(this._grid, theme.raised, {
      font,
      horizontalAlignment: align,
      textColor: theme.quiet,
      backgroundColor: theme.raised
    });
    this._grid.cellRenderers.update({
      body,
      'column-header': head,
      'row-header': head,
      'corner-header': head
    });
  }

  dispose(): void {
    this._sizes?.disconnect();
    this._grid.dispose();
  }

  /** Attach the grid once its host is in the page, which Lumino requires. */
  private _attach(): void {
    const { clientWidth: width, clientHeight: height } = this._host;
    if (!this._host.isConnected || !width || !height) {
      return;
    }
    if (!this._grid.isAttached) {
      Widget.attach(this._grid, this._host);
      this.paint();
    }
    MessageLoop.sendMessage(this._grid, Widget.ResizeMessage.UnknownSize);
    if (width !== this._width) {
      this._width = width;
      columnWidths(width).forEach((size, i) => this._grid.resizeColumn('body', i, size));
    }
  }
}
