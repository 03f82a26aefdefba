// The bus client of one kernel: keeps its state tree, resynchronizes after a gap, sends commands.

import { ClosureTable } from './closures';
import {
  type ICluster,
  type IHello,
  type Incoming,
  type IProblem,
  type ITree,
  mergePatch,
  PROTOCOL
} from './protocol';

/** Transport of messages to the kernel. */
export interface ITransport {
  send(message: Record<string, unknown>): void;
  /** Whether the kernel processes messages while a cell runs; otherwise they wait for its end. */
  readonly concurrent: boolean;
  /** Alternative for queued messages, such as a command for a terminal. */
  readonly hint?: string;
}

export type LinkState = 'connecting' | 'ready' | 'mismatch' | 'ended';

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
/** Number of messages after which the client acknowledges them. */
const ACK_EVERY = 20;
/** The kernel drops clients that are silent for minutes although it sends to them. */
const PING_MS = 60_000;
const QUICK_MS = 20_000;
const SLOW_MS = 300_000;
/** Commands that the kernel answers at once; others wait in the queue of their cluster. */
const QUICK = ['list', 'snapshot', 'pause', 'resume', 'step', 'launchers', 'resolvers', 'value'];

function newId(): string {
  // crypto.randomUUID is not available in pages without TLS.
  return Array.from(crypto.getRandomValues(new Uint32Array(4)), n => n.toString(16)).join('');
}

export class Link {
  readonly client = newId();
  version: string;
  state: LinkState = 'connecting';
  /** Version and protocol from the hello message of the kernel. */
  kernelVersion = '';
  kernelProtocol = PROTOCOL;
  pid = 0;
  /** True if messages can be sent to the kernel. False while the connection is interrupted. */
  connected = true;
  /** Time of the last message of the kernel in seconds since the Unix epoch; 0 before the first. */
  lastMessage = 0;
  tree: ITree = EMPTY;

  private _seq = -1;
  private _synced = false;
  private _endingPid = -1;
  private _acknowledged = 0;
  private _pinging: ReturnType<typeof setInterval> | undefined;
  /** Whether the kernel has sent something since the last ping. */
  private _received = false;
  private _listeners = new Set<() => void>();
  private _scheduled = false;
  private _pending = new Map<string, IPending>();
  private _closures = new Map<string, ClosureTable>();
  private _selected = new Map<string, number>();
  private _subscribed = new Map<string, number>();

  constructor(
    readonly transport: ITransport,
    version: string
  ) {
    this.version = version;
  }

  /** Send a hello message; the kernel replies with its own and with the state tree. */
  hello(): void {
    this._send('hello', {
      protocol: PROTOCOL,
      version: this.version,
      acks: this.transport.concurrent
    });
    this._pinging ??= setInterval(() => this._ping(), PING_MS);
  }

  /** Stop the pings, so that the kernel drops this client. */
  stopPings(): void {
    clearInterval(this._pinging);
    this._pinging = undefined;
  }

  /** True if the kernel can receive commands now. */
  get usable(): boolean {
    return this.state === 'ready' && this.connected;
  }

  /** Whether the tree is up to date. */
  get synced(): boolean {
    return this._synced;
  }

  get clusters(): ICluster[] {
    return Object.values(this.tree.clusters);
  }

  cluster(name: string): ICluster | undefined {
    return this.tree.clusters[name];
  }

  /** Call `listener` after changes, at most once per frame; return an unsubscribe function. */
  onChange(listener: () => void): () => void {
    this._listeners.add(listener);
    return () => this._listeners.delete(listener);
  }

  /** Return the closures of a cluster; they are updated only while subscribed. */
  closures(name: string): ClosureTable {
    let table = this._closures.get(name);
    if (!table) {
      table = new ClosureTable();
      this._closures.set(name, table);
    }
    return table;
  }

  /** Return the id of the selected closure of a cluster, which all views share. */
  selectedClosure(name: string): number | null {
    return this._selected.get(name) ?? null;
  }

  selectClosure(name: string, id: number | null): void {
    if (id !== null) {
      this._selected.set(name, id);
    } else {
      this._selected.delete(name);
    }
    this._scheduleNotify();
  }

  /** Subscribe to the closures of a cluster; return an unsubscribe function. */
  subscribe(name: string): () => void {
    this._subscribed.set(name, (this._subscribed.get(name) ?? 0) + 1);
    this._sendSubscriptions();
    let open = true;
    return () => {
      if (open) {
        open = false;
        const count = (this._subscribed.get(name) ?? 1) - 1;
        if (count > 0) {
          this._subscribed.set(name, count);
        } else {
          this._subscribed.delete(name);
        }
        this._sendSubscriptions();
      }
    };
  }

  /** Send a command; rejects with a `CommandError`. */
  command(command: string, args: Record<string, unknown> = {}): Promise<unknown> {
    if (this.state === 'ended' || this.state === 'mismatch') {
      return Promise.reject(new CommandError({ what: 'the kernel does not respond' }));
    }
    const id = newId();
    return new Promise((resolve, reject) => {
      const timeout = QUICK.includes(command) ? QUICK_MS : SLOW_MS;
      const expire = () => {
        if (!this.transport.concurrent) {
          // The command waits for the running cell, whose duration is unknown.
          pending.timer = setTimeout(expire, timeout);
          return;
        }
        this._pending.delete(id);
        reject(new CommandError({ what: `"${command}" timed out after ${timeout / 1000} s` }));
      };
      const pending: IPending = { resolve, reject, timer: setTimeout(expire, timeout) };
      this._pending.set(id, pending);
      this._send('command', { ...args, request_id: id, command });
    });
  }

  /** Process a message from the kernel. */
  receive(message: Incoming, buffers: readonly (ArrayBuffer | ArrayBufferView)[]): void {
    this.lastMessage = Date.now() / 1000;
    switch (message.kind) {
      case 'hello':
        this._onHello(message);
        break;
      case 'reply':
        this._onReply(message.client, message.request_id, message.value, message.error);
        break;
      case 'bye':
        this.disconnect();
        break;
      case 'state':
        if (this.state === 'ready' && this._accept(message.seq, message.full)) {
          this.tree = message.full
            ? (message.state as ITree)
            : mergePatch(this.tree, message.state);
          this._scheduleNotify();
        }
        break;
      case 'values':
        if (this.state === 'ready' && this._accept(message.seq, false)) {
          this.closures(message.cluster).apply(message, buffers);
          this._scheduleNotify();
        }
        break;
    }
  }

  setConnected(connected: boolean): void {
    if (connected !== this.connected) {
      this.connected = connected;
      this._scheduleNotify();
    }
  }

  /** Record that the kernel has ended or was replaced. */
  disconnect(): void {
    this.stopPings();
    this.state = 'ended';
    this._synced = false;
    this._fail('the kernel has ended');
    this._scheduleNotify();
  }

  /** Record that the kernel restarts; a late hello of the old process is ignored. */
  expectRestart(): void {
    this._endingPid = this.pid;
    this.disconnect();
  }

  /** Send a bye message and drop all listeners. */
  dispose(): void {
    this.stopPings();
    if (this.state === 'ready') {
      this._send('bye', {});
    }
    this._listeners.clear();
    this._fail('the view was closed');
  }

  private _onHello({ protocol, version, pid, known, unknown }: IHello): void {
    if (pid === this._endingPid) {
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
      this._selected.clear();
      this._fail('the kernel was restarted');
    }
    if (known === this.client) {
      this._sendSubscriptions();
    } else if (
      this.state === 'ready' &&
      (restarted || before !== 'ready' || unknown === this.client)
    ) {
      this.hello(); // the kernel has no record of this client yet
    }
    this._scheduleNotify();
  }

  /**
   * Send a keep-alive message if the kernel sends to this client or has its subscriptions.
   *
   * An idle kernel receives no messages, so that the Jupyter server can cull it.
   */
  private _ping(): void {
    if (this.state === 'ready' && (this._received || this._subscribed.size > 0)) {
      this._received = false;
      this._send('ack', { seq: this._seq });
    }
  }

  private _accept(seq: number, full: boolean): boolean {
    this._received = true;
    if (full) {
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
    if (
      this.transport.concurrent &&
      (seq - this._acknowledged >= ACK_EVERY || seq < this._acknowledged)
    ) {
      this._acknowledged = seq;
      this._send('ack', { seq });
    }
    return true;
  }

  private _onReply(client: string, id: string, value: unknown, error?: IProblem): void {
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

  private _sendSubscriptions(): void {
    if (this.state === 'ready') {
      this._send('subscribe', { clusters: [...this._subscribed.keys()] });
    }
  }

  private _send(kind: string, content: Record<string, unknown>): void {
    this.transport.send({ ...content, kind, client: this.client });
  }

  private _scheduleNotify(): void {
    if (this._scheduled) {
      return;
    }
    this._scheduled = true;
    const notify = () => {
      this._scheduled = false;
      for (const listener of [...this._listeners]) {
        listener();
      }
    };
    // Hidden pages get no animation frames.
    if (typeof document !== 'undefined' && !document.hidden) {
      requestAnimationFrame(notify);
    } else {
      setTimeout(notify, 250);
    }
  }
}
