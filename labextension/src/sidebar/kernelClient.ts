// The connection of the panel to one kernel, separate from the connection of the notebook.

import { type Kernel, KernelMessage } from '@jupyterlab/services';
import type { IDisposable } from '@lumino/disposable';
import { type ISignal, Signal } from '@lumino/signaling';

import { type ITransport, Link } from '../shared/link';
import type { Incoming } from '../shared/protocol';

export const TARGET = 'tfd_notebook';
export const COMM_ID = 'tfd_notebook-bus';
export const LOAD = `%load_ext ${TARGET}`;

/** Timeout of a request, after which it is sent again: a starting kernel loses messages. */
const RETRY_MS = 4000;
/** States that the kernel itself publishes; the server publishes `restarting` and `dead`. */
const KERNEL_STATES: string[] = ['starting', 'idle', 'busy'];
/** Timeout of the hello message after the package is loaded. */
const HELLO_MS = 10_000;

/** `unsupported` is a kernel of another language; in an `unloaded` one the package is not loaded. */
export type KernelState = 'connecting' | 'unsupported' | 'unloaded' | 'loaded' | 'ended';

export type Connection = Pick<
  Kernel.IKernelConnection,
  | 'clientId'
  | 'connectionStatus'
  | 'connectionStatusChanged'
  | 'dispose'
  | 'disposed'
  | 'id'
  | 'info'
  | 'iopubMessage'
  | 'isDisposed'
  | 'requestExecute'
  | 'sendControlMessage'
  | 'sendShellMessage'
  | 'status'
  | 'statusChanged'
  | 'username'
>;

export class KernelClient implements IDisposable, ITransport {
  readonly link: Link;
  state: KernelState = 'connecting';
  /** Whether the package is being loaded. */
  loading = false;
  /** Why loading failed, empty otherwise. */
  problem = '';

  private _attached = false;
  private _attempt = 0;
  private _subshell: string | null = null;
  /** Sessions of the messages; each kernel process has its own. */
  private _sessions = new Set<string>();
  private _isDisposed = false;
  private _changed = new Signal<this, void>(this);

  constructor(
    private readonly _connection: Connection,
    version: string
  ) {
    this.link = new Link(this, version);
    _connection.iopubMessage.connect(this._onIopub, this);
    _connection.statusChanged.connect(this._onStatus, this);
    _connection.connectionStatusChanged.connect(this._onConnectionStatus, this);
    _connection.disposed.connect(this._onEnd, this);
    if (_connection.connectionStatus === 'connected') {
      void this._attach();
    }
  }

  /** Emitted when the state of the kernel changes; changes of clusters are reported by the link. */
  get changed(): ISignal<this, void> {
    return this._changed;
  }

  get isDisposed(): boolean {
    return this._isDisposed;
  }

  get concurrent(): boolean {
    return this._subshell !== null;
  }

  get busy(): boolean {
    return this._connection.status === 'busy';
  }

  send(message: Record<string, unknown>): void {
    if (this._connection.isDisposed || this._connection.status === 'dead') {
      return;
    }
    const comm = KernelMessage.createMessage<KernelMessage.ICommMsgMsg<'shell'>>({
      msgType: 'comm_msg',
      channel: 'shell',
      session: this._connection.clientId,
      username: this._connection.username,
      // Set per message: a subshell lost in a restart would block a whole connection.
      subshellId: this._subshell,
      content: { comm_id: COMM_ID, data: message as KernelMessage.ICommMsgMsg['content']['data'] }
    });
    this._connection.sendShellMessage(comm, false).done.catch(() => undefined);
  }

  /** Load the package in the kernel; `problem` has the error. */
  async load(): Promise<void> {
    this.loading = true;
    this.problem = '';
    this._changed.emit();
    try {
      const reply = await this._connection.requestExecute({
        code: LOAD,
        silent: true,
        stop_on_error: false,
        store_history: false
      }).done;
      if (reply.content.status === 'ok') {
        await this._waitForHello();
      } else {
        this.problem = loadProblem(reply.content as KernelMessage.IReplyErrorContent);
      }
    } catch {
      this.problem = 'loading failed: the kernel ended';
    }
    this.loading = false;
    this._changed.emit();
  }

  /**
   * Send a bye message; the kernel keeps running.
   *
   * The connection stays open, because closing it during unload loses the last messages.
   */
  sendBye(): void {
    if (this._connection.isDisposed || this._connection.status === 'dead') {
      return;
    }
    // The link is not disposed of: open views keep their last state.
    this.link.stopPings();
    this.send({ kind: 'bye', client: this.link.client });
    if (this._subshell !== null) {
      // This message may be lost; then the next page in this tab reuses the subshell.
      sessionStorage.setItem(this._key, this._subshell);
      const shell = { subshell_id: this._subshell };
      this._control('delete_subshell_request', shell).done.catch(() => undefined);
    }
  }

  dispose(): void {
    if (this._isDisposed) {
      return;
    }
    this._isDisposed = true;
    this._attempt += 1;
    this.sendBye();
    this._connection.dispose();
    this.link.disconnect();
    Signal.clearData(this);
  }

  private _onIopub(_: unknown, message: KernelMessage.IIOPubMessage): void {
    if (KernelMessage.isStatusMsg(message)) {
      this._onExecutionState(message.content.execution_state, message.header.session);
    } else if (
      KernelMessage.isCommMsgMsg(message) &&
      message.content.comm_id === COMM_ID &&
      this._attached
    ) {
      const buffers = message.buffers ?? [];
      this.link.receive(message.content.data as unknown as Incoming, buffers);
      const state = this.link.state === 'ended' ? 'unloaded' : 'loaded';
      if (state !== this.state) {
        this._setState(state);
      }
    }
  }

  private _onExecutionState(state: string, session: string): void {
    if (KERNEL_STATES.includes(state) && !this._sessions.has(session)) {
      const first = this._sessions.size === 0;
      this._sessions.add(session);
      // A restart by another client is visible only here. The old kernel may be killed before its
      // bye message. The first messages of the new one may arrive before the connection is up.
      if (!first || state === 'starting') {
        this._onRestart();
      }
    }
  }

  private _onStatus(_: unknown, status: Kernel.Status): void {
    if (status === 'restarting' || status === 'autorestarting') {
      this.link.expectRestart();
      this._onRestart();
    } else if (status === 'dead') {
      this._onEnd();
    }
  }

  private _onConnectionStatus(_: unknown, status: Kernel.ConnectionStatus): void {
    this.link.setConnected(status === 'connected');
    if (status === 'connected') {
      void this._attach();
    }
  }

  private _onRestart(): void {
    this._attached = false;
    this._subshell = null;
    this.link.disconnect();
    this._setState('connecting');
    if (this._connection.connectionStatus === 'connected') {
      void this._attach();
    }
  }

  private _onEnd(): void {
    this._attempt += 1;
    if (!this._isDisposed && this.state !== 'ended') {
      this.link.disconnect();
      this._setState('ended');
    }
  }

  /** Detect the language, subshells and whether the package is loaded. */
  private async _attach(): Promise<void> {
    const attempt = ++this._attempt;
    const superseded = () => attempt !== this._attempt;
    const info = await this._request<KernelMessage.IInfoReply>(
      'kernel_info_request',
      {},
      superseded
    );
    if (!info) {
      return;
    }
    if (info.language_info?.name !== 'python') {
      this._setState('unsupported');
      return;
    }
    if (info.supported_features?.includes('kernel subshells')) {
      await this._enterSubshell(superseded);
    }
    if (superseded()) {
      return;
    }
    this._attached = true;
    const comms = await this._request<KernelMessage.ICommInfoReply>(
      'comm_info_request',
      { target_name: TARGET },
      superseded
    );
    if (!comms) {
      return;
    }
    if (COMM_ID in comms.comms) {
      this.link.hello();
    } else if (this.link.state !== 'ready') {
      this._setState('unloaded');
    }
  }

  /** Create a subshell, or reuse it after a reconnect. */
  private async _enterSubshell(superseded: () => boolean): Promise<void> {
    if (this._subshell !== null) {
      const list = await this._request<{ subshell_id: string[] }>(
        'list_subshell_request',
        {},
        superseded
      );
      if (!list || list.subshell_id.includes(this._subshell)) {
        return;
      }
    }
    const reply = await this._request<{ subshell_id: string }>(
      'create_subshell_request',
      {},
      superseded
    );
    if (reply) {
      this._subshell = reply.subshell_id;
    }
  }

  /**
   * Send a request on the control channel, which replies even while a cell runs.
   *
   * Return null if the request was superseded.
   */
  private async _request<T>(
    type: KernelMessage.ControlMessageType | KernelMessage.ShellMessageType,
    content: Record<string, unknown>,
    superseded: () => boolean
  ): Promise<T | null> {
    while (!superseded() && !this._connection.isDisposed && this._connection.status !== 'dead') {
      const future = this._control(type, content);
      let timer: ReturnType<typeof setTimeout> | undefined;
      const timedOut = new Promise<null>(resolve => {
        timer = setTimeout(() => resolve(null), RETRY_MS);
      });
      const replies: Promise<unknown>[] = [
        timedOut,
        future.done.then(
          message => message.content,
          () => timedOut
        )
      ];
      if (type === 'kernel_info_request') {
        // Some kernels reply only on the shell channel, where JupyterLab has sent the same request.
        replies.push(this._connection.info.catch(() => timedOut));
      }
      const reply = await Promise.race(replies);
      clearTimeout(timer);
      if (reply !== null) {
        return superseded() ? null : (reply as T);
      }
      future.dispose();
    }
    return null;
  }

  private _control(type: string, content: Record<string, unknown>) {
    // The type allows only some messages here, but kernels accept all.
    const message = KernelMessage.createMessage({
      msgType: type as 'debug_request',
      channel: 'control',
      session: this._connection.clientId,
      username: this._connection.username,
      content: content as unknown as KernelMessage.IDebugRequestMsg['content']
    });
    return this._connection.sendControlMessage(message, true);
  }

  private get _key(): string {
    return `tfd-notebook:subshell:${this._connection.id}`;
  }

  private _waitForHello(): Promise<void> {
    return new Promise(resolve => {
      const check = () => {
        if (this.state === 'loaded') {
          end();
        }
      };
      const timer = setTimeout(() => {
        this.problem = `${LOAD} timed out. Next: run it in a cell, which shows its output`;
        end();
      }, HELLO_MS);
      const end = () => {
        clearTimeout(timer);
        this._changed.disconnect(check);
        resolve();
      };
      this._changed.connect(check);
      check();
    });
  }

  private _setState(state: KernelState): void {
    this.state = state;
    if (state === 'loaded') {
      this.problem = '';
    }
    this._changed.emit();
  }
}

function loadProblem({ ename, evalue }: KernelMessage.IReplyErrorContent): string {
  const next =
    ename === 'ModuleNotFoundError'
      ? ' Next: run "%pip install tfd-notebook" in that notebook'
      : ` Next: run ${LOAD} in a cell, which shows the whole error`;
  return `${ename}: ${evalue}.${next}`;
}
