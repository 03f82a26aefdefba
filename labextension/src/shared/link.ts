// One reader of one kernel: keeps what the kernel told, asks again after a gap, sends commands.

import { ClosureTable } from './closures';
import {
  type ICluster,
  type IHello,
  type Incoming,
  type IProblem,
  type ITree,
  merged,
  PROTOCOL
} from './protocol';

/** How messages reach the kernel. */
export interface ITransport {
  send(message: Record<string, unknown>): void;
  /** Whether messages are taken while a cell runs; otherwise they wait for its end. */
  readonly beside: boolean;
  /** What to do where they wait, such as a command for a terminal. */
  readonly hint?: string;
}

export type LinkState = 'connecting' | 'ready' | 'mismatch' | 'gone';

export class CommandError extends Error {
  constructor(readonly problem: IProblem) {
    super(problem.what);
    this.name = 'CommandError';
  }
}

interface IPending {
  resolve(value: unknown): void;
  reject(error: Error): void;
  timer: ReturnType<typeof setTimeout>;
}

const EMPTY: ITree = { clusters: {} };
/** The reader tells what it has seen after so many messages. */
const TELL_EVERY = 20;
/** A kernel forgets a reader that it sends to and that stays silent for minutes. */
const PING_MS = 60_000;
const QUICK_MS = 20_000;
const SLOW_MS = 300_000;
/** Commands that the kernel answers at once; all others may wait, each in its cluster's queue. */
const QUICK = ['list', 'snapshot', 'pause', 'resume', 'step', 'kinds', 'resolvers'];

function newId(): string {
  // Not crypto.randomUUID, which pages without TLS do not have.
  return Array.from(crypto.getRandomValues(new Uint32Array(4)), n => n.toString(16)).join('');
}

export class Link {
  readonly client = newId();
  version: string;
  state: LinkState = 'connecting';
  /** What the kernel said of itself. */
  kernelVersion = '';
  kernelProtocol = PROTOCOL;
  pid = 0;
  tree: ITree = EMPTY;

  private _seq = -1;
  private _synced = false;
  private _ending = -1;
  private _told = 0;
  private _pinging: ReturnType<typeof setInterval> | undefined;
  /** Whether the kernel has sent something since the last ping. */
  private _received = false;
  private _listeners = new Set<() => void>();
  private _scheduled = false;
  private _pending = new Map<string, IPending>();
  private _closures = new Map<string, ClosureTable>();
  private _wanted = new Map<string, number>();

  constructor(
    readonly transport: ITransport,
    version: string
  ) {
    this.version = version;
  }

  /** Ask who is there; the answer brings everything else. */
  hello(): void {
    this._send('hello', {
      protocol: PROTOCOL,
      version: this.version,
      tells: this.transport.beside
    });
    this._pinging ??= setInterval(() => this._ping(), PING_MS);
  }

  /** Send no more pings, so that the kernel forgets this reader. */
  rest(): void {
    clearInterval(this._pinging);
    this._pinging = undefined;
  }

  /** Whether the tree is what the kernel has now. */
  get synced(): boolean {
    return this._synced;
  }

  get clusters(): ICluster[] {
    return Object.values(this.tree.clusters);
  }

  cluster(name: string): ICluster | undefined {
    return this.tree.clusters[name];
  }

  /** Call `listener` at most once a frame when something has changed; returns what ends that. */
  onChange(listener: () => void): () => void {
    this._listeners.add(listener);
    return () => this._listeners.delete(listener);
  }

  /** The closures of a cluster; what it shows is kept up to date between `want` and its end. */
  closures(name: string): ClosureTable {
    let table = this._closures.get(name);
    if (!table) {
      table = new ClosureTable();
      this._closures.set(name, table);
    }
    return table;
  }

  /** Have the closures of a cluster sent; returns what ends that. */
  want(name: string): () => void {
    this._wanted.set(name, (this._wanted.get(name) ?? 0) + 1);
    this._sendWanted();
    let open = true;
    return () => {
      if (open) {
        open = false;
        const left = (this._wanted.get(name) ?? 1) - 1;
        if (left > 0) {
          this._wanted.set(name, left);
        } else {
          this._wanted.delete(name);
        }
        this._sendWanted();
      }
    };
  }

  /** Have the kernel do something; rejects with a `CommandError`. */
  command(command: string, args: Record<string, unknown> = {}): Promise<unknown> {
    if (this.state === 'gone' || this.state === 'mismatch') {
      return Promise.reject(new CommandError({ what: 'the kernel does not answer' }));
    }
    const id = newId();
    return new Promise((resolve, reject) => {
      const limit = QUICK.includes(command) ? QUICK_MS : SLOW_MS;
      const give = () => {
        if (!this.transport.beside) {
          // It waits for the running cell, which may take any time.
          pending.timer = setTimeout(give, limit);
          return;
        }
        this._pending.delete(id);
        reject(new CommandError({ what: `no answer to "${command}" after ${limit / 1000} s` }));
      };
      const pending: IPending = { resolve, reject, timer: setTimeout(give, limit) };
      this._pending.set(id, pending);
      this._send('command', { ...args, ask: id, command });
    });
  }

  /** Take a message of the kernel's. */
  receive(message: Incoming, buffers: readonly (ArrayBuffer | ArrayBufferView)[]): void {
    switch (message.kind) {
      case 'hello':
        this._greeted(message);
        break;
      case 'reply':
        this._replied(message.client, message.ask, message.value, message.error);
        break;
      case 'bye':
        this.gone();
        break;
      case 'state':
        if (this.state === 'ready' && this._accept(message.seq, message.whole)) {
          this.tree = message.whole ? (message.state as ITree) : merged(this.tree, message.state);
          this._changed();
        }
        break;
      case 'values':
        if (this.state === 'ready' && this._accept(message.seq, false)) {
          this.closures(message.cluster).take(message, buffers);
          this._changed();
        }
        break;
    }
  }

  /** The kernel has ended, or is another one now. */
  gone(): void {
    this.rest();
    this.state = 'gone';
    this._synced = false;
    this._fail('the kernel has ended');
    this._changed();
  }

  /** The kernel ends, and another one takes its place; it may still greet on its way out. */
  restarts(): void {
    this._ending = this.pid;
    this.gone();
  }

  /** Say goodbye. */
  dispose(): void {
    this.rest();
    if (this.state === 'ready') {
      this._send('bye', {});
    }
    this._listeners.clear();
    this._fail('the view was closed');
  }

  private _greeted({ protocol, version, pid, known, unknown }: IHello): void {
    if (pid === this._ending) {
      return;
    }
    const restarted = this.pid !== 0 && pid !== this.pid;
    const before = this.state;
    this.kernelProtocol = protocol;
    this.kernelVersion = version;
    this.pid = pid;
    this.state = protocol === PROTOCOL ? 'ready' : 'mismatch';
    if (restarted) {
      this.tree = EMPTY;
      this._synced = false;
      this._closures.clear();
      this._fail('the kernel was restarted');
    }
    if (known === this.client) {
      this._sendWanted();
    } else if (
      this.state === 'ready' &&
      (restarted || before !== 'ready' || unknown === this.client)
    ) {
      this.hello(); // it spoke first, and does not know us
    }
    this._changed();
  }

  /**
   * Report that the page is open, if the kernel sends to it or counts on it.
   *
   * A kernel that is not used gets no messages, so that its server can cull it.
   */
  private _ping(): void {
    if (this.state === 'ready' && (this._received || this._wanted.size > 0)) {
      this._received = false;
      this._send('seen', { seq: this._seq });
    }
  }

  private _accept(seq: number, whole: boolean): boolean {
    this._received = true;
    if (whole) {
      this._synced = true;
    } else if (!this._synced) {
      return false;
    } else if (seq !== this._seq + 1) {
      this._synced = false;
      this._seq = seq;
      this._send('resync', {});
      return false;
    }
    this._seq = seq;
    if (this.transport.beside && (seq - this._told >= TELL_EVERY || seq < this._told)) {
      this._told = seq;
      this._send('seen', { seq });
    }
    return true;
  }

  private _replied(client: string, id: string, value: unknown, error?: IProblem): void {
    const pending = client === this.client ? this._pending.get(id) : undefined;
    if (pending) {
      this._pending.delete(id);
      clearTimeout(pending.timer);
      if (error) {
        pending.reject(new CommandError(error));
      } else {
        pending.resolve(value);
      }
    }
  }

  private _fail(what: string): void {
    for (const pending of this._pending.values()) {
      clearTimeout(pending.timer);
      pending.reject(new CommandError({ what }));
    }
    this._pending.clear();
  }

  private _sendWanted(): void {
    if (this.state === 'ready') {
      this._send('want', { values: [...this._wanted.keys()] });
    }
  }

  private _send(kind: string, content: Record<string, unknown>): void {
    this.transport.send({ ...content, kind, client: this.client });
  }

  private _changed(): void {
    if (this._scheduled) {
      return;
    }
    this._scheduled = true;
    const tell = () => {
      this._scheduled = false;
      for (const listener of [...this._listeners]) {
        listener();
      }
    };
    // Hidden pages get no frames; they are told, and draw nothing.
    if (typeof document !== 'undefined' && !document.hidden) {
      requestAnimationFrame(tell);
    } else {
      setTimeout(tell, 250);
    }
  }
}
