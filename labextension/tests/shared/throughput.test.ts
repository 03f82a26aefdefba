import { afterEach, beforeEach, expect, test, vi } from 'vitest';

import { clock } from '../../src/shared/figures';
import { ThroughputView } from '../../src/shared/throughputView';
import { clusterOf, FakeKernel } from './kernel';
import { attach, clearPage } from './page';

interface IOptions {
  cursor: { sync: { key: string; filters: { pub: (type: string) => boolean } } };
  hooks: Record<string, ((plot: FakePlot) => void)[]>;
  series: { label?: string; show?: boolean }[];
}

const plots: FakePlot[] = [];

/** A plot without a canvas, in which one pixel is one second. */
class FakePlot {
  readonly over = document.createElement('div');
  readonly cursor: { idx: number | null } = { idx: null };
  select = { left: 0, top: 0, width: 0, height: 0 };
  width = 300;

  constructor(
    readonly options: IOptions,
    public data: (number | null)[][],
    host: HTMLElement
  ) {
    host.append(this.over);
    plots.push(this);
  }

  setData(data: (number | null)[][]): void {
    this.data = data;
    this.fire('draw');
  }

  setSeries(index: number, { show }: { show: boolean }): void {
    this.options.series[index].show = show;
  }

  setSelect(select: FakePlot['select']): void {
    this.select = select;
  }

  posToVal(x: number): number {
    return this.data[0][0]! + x;
  }

  valToPos(value: number): number {
    return value - this.data[0][0]!;
  }

  destroy(): void {
    this.over.remove();
  }

  fire(hook: string): void {
    this.options.hooks[hook].forEach(callback => callback(this));
  }
}

vi.mock('uplot', () => ({
  default: class {
    constructor(...args: ConstructorParameters<typeof FakePlot>) {
      return new FakePlot(...args);
    }
  }
}));

const NOW = 1_700_000_000;

let view: ThroughputView;

beforeEach(async () => {
  vi.useFakeTimers({ now: NOW * 1000 });
  vi.spyOn(HTMLElement.prototype, 'clientWidth', 'get').mockReturnValue(300);
  const kernel = FakeKernel.connected();
  const stream = { name: 'train', kind: 'stream', state: 'running', elements: 1, bytes: 0 };
  const recorded = Array.from({ length: 60 }, (_, i) => i);
  const task = { state: 'ready', restarts: 0, bytes_per_s: 2e6 };
  const cluster = clusterOf('c', {
    streams: { train: { ...stream, elements_per_s: 59, bytes_per_s: 0, history: [] } },
    tasks: {
      'data_worker:0': { ...task, task: 'data_worker:0', role: 'data_worker', index: 0 },
      'ps:0': { ...task, task: 'ps:0', role: 'ps', index: 0 }
    },
    order: ['data_worker:0', 'ps:0'],
    notices: [
      { time: NOW - 20, severity: 'warning', what: 'killed <b>', task: 'data_worker:0' },
      { time: NOW - 400, severity: 'info', what: 'too early' }
    ]
  });
  kernel.state({ clusters: { c: cluster } });
  view = attach(new ThroughputView(kernel.link, 'c', { readOnly: false }));
  const rates = { until: NOW, streams: { train: recorded }, tasks: {} };
  kernel.reply({ value: rates }, kernel.rates[0]);
  await vi.advanceTimersByTimeAsync(2000);
});

afterEach(() => {
  clearPage();
  plots.splice(0);
  vi.restoreAllMocks();
  vi.useRealTimers();
});

function legend(): HTMLButtonElement[] {
  return [...view.node.querySelectorAll<HTMLButtonElement>('.tfd-legend button')];
}

function hover(index: number | null): void {
  for (const plot of plots) {
    plot.cursor.idx = index;
    plot.fire('setCursor');
  }
}

function pressed(): string[] {
  const spans = view.node.querySelectorAll('.tfd-row button[aria-pressed="true"]');
  return [...spans].map(button => button.textContent);
}

test('the bytes of data workers are drawn, without those of other tasks', () => {
  expect(plots.map(plot => plot.options.series.slice(1).map(({ label }) => label))).toEqual([
    ['train'],
    ['data_worker:0']
  ]);
});

test('the legend has the values at the cursor, and the latest ones without it', () => {
  const texts = () => legend().map(item => item.textContent);
  const time = plots[0].data[0][10]!;
  hover(10);
  expect(texts()).toEqual(['train 10', 'data_worker:0 –']);
  expect([...view.node.querySelectorAll('h4')].map(title => title.textContent)).toEqual([
    `elements per second at ${clock(time)}`,
    `bytes sent per second at ${clock(time)}`
  ]);
  hover(null);
  expect(texts()).toEqual(['train 59', 'data_worker:0 2.0 MB/s']);
  expect(view.node.querySelector('h4')!.textContent).toBe('elements per second');
});

test('both charts share the cursor, but not the selection', () => {
  const [first, second] = plots.map(plot => plot.options.cursor.sync);
  expect(first.key).toBe(second.key);
  expect(['mousemove', 'mousedown', 'mouseup'].map(type => first.filters.pub(type))).toEqual([
    true,
    false,
    false
  ]);
});

test('a click in the legend hides a series until the next click', () => {
  const [train] = legend();
  train.click();
  expect(train.getAttribute('aria-pressed')).toBe('false');
  expect(plots[0].options.series[1].show).toBe(false);
  vi.advanceTimersByTime(1000);
  train.click();
  expect(train.getAttribute('aria-pressed')).toBe('true');
  expect(plots[0].options.series[1].show).toBe(true);
});

test('a selected time range stays until a double click or a click on a span', () => {
  const ranges = () => plots.map(({ data: [times] }) => [times[0], times.at(-1)]);
  const range = [plots[0].data[0][5], plots[0].data[0][25]];
  const drag = (left: number, width: number) => {
    plots[0].select = { left, width, top: 0, height: 100 };
    plots[0].fire('setSelect');
  };
  expect(pressed()).toEqual(['3 min']);
  drag(5, 20);
  expect(plots[0].select.width).toBe(0);
  expect(ranges()).toEqual([range, range]);
  expect(pressed()).toEqual([]);
  vi.advanceTimersByTime(3000);
  expect(ranges()).toEqual([range, range]);
  view.node.querySelector('.tfd-chart')!.dispatchEvent(new MouseEvent('dblclick'));
  expect(ranges()[1][1]).toBe(NOW + 5);
  drag(5, 20);
  view.node.querySelectorAll('button')[0].click();
  expect(pressed()).toEqual(['1 min']);
  expect(ranges()[0]).toEqual([NOW - 54, NOW + 5]);
  drag(5, 1);
  expect(pressed()).toEqual(['1 min']);
});

test('notices in the time range are lines with a title', () => {
  plots.forEach(plot => plot.fire('draw'));
  const lines = [...view.node.querySelectorAll<HTMLElement>('.tfd-marks > div')];
  expect(lines.map(line => line.title)).toEqual(
    Array(2).fill(`${clock(NOW - 20)} data_worker:0: killed <b>`)
  );
  expect(lines[0].className).toBe('tfd-warn');
  expect(lines[0].style.left).toBe('40px');
});
