// A fake of the kernel side of the bus.

import { type IValuesMessage, PROTOCOL } from '../../src/shared/protocol';
import { type ITransport, Link } from '../../src/shared/link';

export interface ISent extends Record<string, unknown> {
  kind: string;
  client: string;
}

export class FakeKernel implements ITransport {
  readonly sent: ISent[] = [];
  /** Requests for recorded rates, which views make by themselves. */
  readonly rates: ISent[] = [];
  readonly link: Link;
  concurrent = true;
  seq = 0;

  constructor() {
    this.link = new Link(this, '0.1.0');
  }

  /** Return a kernel that has replied to the first message of the page. */
  static connected(): FakeKernel {
    const kernel = new FakeKernel();
    kernel.link.hello();
    kernel.sendHello();
    return kernel;
  }

  send(message: Record<string, unknown>): void {
    (message.command === 'rates' ? this.rates : this.sent).push(message as ISent);
  }

  of(kind: string): ISent[] {
    return this.sent.filter(message => message.kind === kind);
  }

  sendHello(more: Record<string, unknown> = {}): void {
    this.link.receive(
      {
        kind: 'hello',
        protocol: PROTOCOL,
        version: '0.1.0',
        pid: 7,
        known: this.link.client,
        ...more
      },
      []
    );
  }

  state(state: unknown, full = true): void {
    this.seq += 1;
    this.link.receive({ kind: 'state', seq: this.seq, full, state }, []);
  }

  values(cluster: string, rows: readonly IRow[], full: boolean, more = {}): void {
    this.seq += 1;
    const { message, buffers } = packed(rows, full);
    this.link.receive({ ...message, seq: this.seq, cluster, ...more }, buffers);
  }

  /** Reply to a command, by default the latest. */
  reply(answer: Record<string, unknown>, command = this.of('command').at(-1)!): void {
    const { request_id, client } = command;
    this.link.receive({ kind: 'reply', client, request_id: request_id as string, ...answer }, []);
  }
}

export interface IRow {
  id: number;
  function?: number;
  state?: number;
  worker?: number;
  dispatched?: number;
  finished?: number;
  error?: string;
}

export const FUNCTIONS = ['train', '<b>eval</b>', 'a'];

export function packed(
  rows: readonly IRow[],
  full: boolean
): { message: IValuesMessage; buffers: ArrayBuffer[] } {
  const column = (name: keyof IRow, missing: number) =>
    rows.map(row => (row[name] as number | undefined) ?? missing);
  const buffers = [
    Float64Array.from(column('id', 0)),
    Int32Array.from(column('function', 0)),
    Uint8Array.from(column('state', 0)),
    Int16Array.from(column('worker', -1)),
    Uint16Array.from(column('id', 0).map(() => 1)),
    Float64Array.from(column('id', 0)),
    Float64Array.from(column('dispatched', NaN)),
    Float64Array.from(column('dispatched', NaN)),
    Float64Array.from(column('finished', NaN)),
    Float64Array.from(column('finished', NaN))
  ].map(array => array.buffer);
  const errors = Object.fromEntries(
    rows.filter(row => row.error).map(row => [String(row.id), row.error!])
  );
  return {
    buffers,
    message: {
      kind: 'values',
      seq: 0,
      cluster: 'c',
      full,
      count: rows.length,
      columns: [
        ['id', 'f8'],
        ['function', 'i4'],
        ['state', 'u1'],
        ['worker', 'i2'],
        ['attempts', 'u2'],
        ['queued', 'f8'],
        ['dispatched', 'f8'],
        ['started', 'f8'],
        ['fetching', 'f8'],
        ['finished', 'f8']
      ],
      functions: FUNCTIONS,
      errors,
      lost: [],
      paused: false,
      now: 100,
      max_rows: 100_000
    }
  };
}

export function clusterOf(name: string, more: Record<string, unknown> = {}) {
  return {
    name,
    launcher: 'local',
    state: 'ready',
    planned: { dispatcher: 1, data_worker: 2 },
    requested: { dispatcher: 1, data_worker: 2 },
    observed: { dispatcher: 1, data_worker: 2 },
    tasks: {
      'data_worker:0': {
        task: 'data_worker:0',
        role: 'data_worker',
        index: 0,
        state: 'ready',
        restarts: 0
      }
    },
    order: ['data_worker:0'],
    streams: {},
    notices: [],
    ...more
  };
}
