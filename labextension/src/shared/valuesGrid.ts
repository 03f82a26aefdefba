// The grid of closures: a data model over the index, and a DataGrid in the colours of the theme.

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
import { brief, clock, gist, sign, tone } from './figures';
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
  { name: 'worker', width: 62, right: true },
  { name: 'attempts', width: 74, right: true },
  { name: 'waited', width: 72, right: true },
  { name: 'ran', width: 72, right: true },
  { name: 'fetched', width: 72, right: true },
  { name: 'queued', width: 78 },
  { name: 'error', width: 160 }
];
const EDGE = 5;

export class ClosureModel extends DataModel {
  private _rows = 0;

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

  /** Tell the grid that the index was updated. */
  updated(): void {
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
    if (now) {
      this.emitChanged({
        type: 'cells-changed',
        region: 'body',
        row: 0,
        column: 0,
        rowSpan: now,
        columnSpan: GRID_COLUMNS.length
      });
    }
  }

  /** Tell the grid that it is sorted otherwise. */
  sorted(): void {
    this.updated();
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

/** What a cell says. */
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
      return brief(table.fetching[row] - table.started[row]);
    case 'fetched':
      return brief(table.finished[row] - table.fetching[row]);
    case 'queued':
      return Number.isNaN(table.queued[row]) ? '' : clock(table.queued[row]);
    case 'error':
      return gist(table.errorOf(row));
  }
}

/** Selects rows, and tells which header was clicked. */
class MouseHandler extends BasicMouseHandler {
  constructor(private readonly _clicked: (column: number) => void) {
    super();
  }

  override onMouseDown(grid: DataGrid, event: MouseEvent): void {
    const hit = grid.hitTest(event.clientX, event.clientY);
    const inside = hit.x > EDGE && hit.width - hit.x > EDGE; // else it is resized
    if (hit.region === 'column-header' && inside) {
      this._clicked(hit.column);
    } else {
      super.onMouseDown(grid, event);
    }
  }
}

/** Draws cells upon the grid's canvas at once, see `drawDirectly`. */
class DirectRenderer extends TextRenderer {
  constructor(
    private readonly _grid: DataGrid,
    private readonly _back: string,
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
    context.fillStyle = this._back;
    context.fillRect(config.x, y, config.width - 1, height);
    const gc = new GraphicsContext(context);
    super.paint(gc, config);
    gc.dispose();
    context.restore();
  }
}

/**
 * Have the grid not copy single cells.
 *
 * It has them drawn upon another canvas, and copies each from there. Where canvases have no
 * hardware, Chromium copies all of the other canvas for every cell, which takes 1.5 ms each.
 */
function drawDirectly(grid: DataGrid): void {
  const context = grid.viewport.node.querySelector('canvas')?.getContext('2d');
  if (context) {
    const draw = CanvasRenderingContext2D.prototype.drawImage as (...args: unknown[]) => void;
    context.drawImage = (...args: unknown[]) => {
      // Parts of the canvas itself are moved when it is scrolled; a whole is kept when it grows.
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
  private _moving = false;

  constructor(
    private readonly _host: HTMLElement,
    private readonly _table: () => ClosureTable,
    private readonly _index: ClosureIndex,
    onSort: (column: SortColumn) => void,
    onSelect: (row: number | null) => void
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
    this._grid.keyHandler = new BasicKeyHandler();
    this._grid.mouseHandler = new MouseHandler(column => onSort(GRID_COLUMNS[column].name));
    GRID_COLUMNS.forEach(({ width }, i) => this._grid.resizeColumn('body', i, width));
    this._selection.changed.connect(() => {
      if (!this._moving) {
        const place = this._selection.cursorRow;
        onSelect(place >= 0 && place < _index.length ? _index.rows[place] : null);
      }
    });
    this._sizes =
      typeof ResizeObserver === 'undefined' ? null : new ResizeObserver(() => this._fit());
    this._sizes?.observe(_host);
  }

  /** Show the rows of the index, sorted otherwise or not, with the row of `selected` marked. */
  update(selected: number | null, sorted: boolean): void {
    this._moving = true;
    if (sorted) {
      this._model.sorted();
    } else {
      this._model.updated();
    }
    const place = selected === null ? -1 : this._index.placeOf(selected);
    if (place < 0) {
      this._selection.clear();
    } else if (place !== this._selection.cursorRow) {
      this._selection.select({
        r1: place,
        r2: place,
        c1: 0,
        c2: GRID_COLUMNS.length - 1,
        cursorRow: place,
        cursorColumn: 0,
        clear: 'all'
      });
    }
    this._moving = false;
  }

  toTop(): void {
    this._grid.scrollTo(this._grid.scrollX, 0);
  }

  /** Take the colours of the page. */
  paint(): void {
    const seen = colors(this._host);
    const font = `12px ${seen.font}`;
    this._grid.style = {
      ...DataGrid.defaultStyle,
      voidColor: seen.back,
      backgroundColor: seen.back,
      gridLineColor: seen.line,
      verticalGridLineColor: 'transparent',
      horizontalGridLineColor: seen.dark ? 'rgba(255,255,255,.1)' : 'rgba(0,0,0,.08)',
      headerBackgroundColor: seen.raised,
      headerGridLineColor: seen.line,
      headerVerticalGridLineColor: seen.dark ? 'rgba(255,255,255,.2)' : 'rgba(0,0,0,.15)',
      selectionFillColor: seen.dark ? 'rgba(93,178,242,.28)' : 'rgba(11,107,184,.16)',
      selectionBorderColor: seen.accent,
      cursorFillColor: 'transparent',
      cursorBorderColor: 'transparent',
      headerSelectionFillColor: 'transparent',
      headerSelectionBorderColor: 'transparent'
    };
    const align = ({ column }: CellRenderer.CellConfig) =>
      GRID_COLUMNS[column].right ? 'right' : 'left';
    const tones: Record<string, string> = {
      good: seen.text,
      quiet: seen.text,
      warn: seen.warn,
      bad: seen.bad
    };
    const body = new DirectRenderer(this._grid, seen.back, {
      font,
      horizontalAlignment: align,
      elideDirection: 'right',
      textColor: ({ row, column }: CellRenderer.CellConfig) => {
        const { name } = GRID_COLUMNS[column];
        const at = this._index.rows[row];
        return name === 'state'
          ? tones[tone(this._table().stateOf(at))]
          : name === 'error'
            ? seen.bad
            : seen.text;
      }
    });
    const head = new DirectRenderer(this._grid, seen.raised, {
      font,
      horizontalAlignment: align,
      textColor: seen.quiet,
      backgroundColor: seen.raised
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

  /** A widget can only be attached where there is a page, which may come later. */
  private _fit(): void {
    const { clientWidth: width, clientHeight: height } = this._host;
    if (!this._host.isConnected || !width || !height) {
      return;
    }
    if (!this._grid.isAttached) {
      Widget.attach(this._grid, this._host);
      this.paint();
    }
    MessageLoop.sendMessage(this._grid, Widget.ResizeMessage.UnknownSize);
  }
}
