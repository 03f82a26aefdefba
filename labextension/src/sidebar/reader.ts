// One kernel as the panel sees it: a connection of its own, beside that of the notebook.

import { type Kernel, KernelMessage } from '@jupyterlab/services';
import type { IDisposable } from '@lumino/disposable';
import { type ISignal, Signal } from '@lumino/signaling';

import { type ITransport, Link } from '../shared/link';
import type { Incoming } from '../shared/protocol';

export const TARGET = 'tfd_notebook';
export const COMM_ID = 'tfd_notebook-bus';
export const LOAD = `%load_ext ${TARGET}`;

/** Kernels that just started lose what is sent too early: it is asked again after so long. */
const AGAIN_MS = 4000;
/** What kernels say of themselves; that one restarts or is dead says the server in their place. */
const OWN_WORDS: string[] = ['starting', 'idle', 'busy'];
/** The package says hello when it is loaded; it has so long for that. */
const HELLO_MS = 10_000;

/** `foreign`: no Python; `unloaded`: the package is not loaded, or no longer. */
export type KernelState = 'connecting' | 'foreign' | 'unloaded' | 'loaded' | 'ended';

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

export class KernelReader implements IDisposable, ITransport {
  readonly link: Link;
  state: KernelState = 'connecting';
  /** Whether the package is being loaded, and why it could not be. */
  loading = false;
  problem = '';

  private _attached = false;
  private _attempt = 0;
  private _subshell: string | null = null;
  /** The processes that were heard as this kernel: each signs with a session of its own. */
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

  /** The state of the kernel changed; of its clusters the link tells. */
  get changed(): ISignal<this, void> {
    return this._changed;
  }

  get isDisposed(): boolean {
    return this._isDisposed;
  }

  get beside(): boolean {
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
      // Not the subshell of the whole connection: one that a restart took would swallow all of it.
      subshellId: this._subshell,
      content: { comm_id: COMM_ID, data: message as KernelMessage.ICommMsgMsg['content']['data'] }
    });
    this._connection.sendShellMessage(comm, false).done.catch(() => undefined);
  }

  /** Load the package in the kernel; what goes wrong is in `problem`. */
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
        await this._greeted();
      } else {
        this.problem = loadProblem(reply.content as KernelMessage.IReplyErrorContent);
      }
    } catch {
      this.problem = 'the kernel ended before it had loaded the package';
    }
    this.loading = false;
    this._changed.emit();
  }

  /**
   * Say goodbye to the kernel, which goes on.
   *
   * The connection stays open: a page that closes it while it is left loses what it sent last.
   */
  leave(): void {
    if (this._connection.isDisposed || this._connection.status === 'dead') {
      return;
    }
    // Views that stay show what they saw last, so the link is not disposed of.
    this.link.rest();
    this.send({ kind: 'bye', client: this.link.client });
    if (this._subshell !== null) {
      // What is sent now may still be lost; then the page that comes next in this tab takes it over.
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
    this.leave();
    this._connection.dispose();
    this.link.gone();
    Signal.clearData(this);
  }

  private _onIopub(_: unknown, message: KernelMessage.IIOPubMessage): void {
    if (KernelMessage.isStatusMsg(message)) {
      this._onWords(message.content.execution_state, message.header.session);
    } else if (
      KernelMessage.isCommMsgMsg(message) &&
      message.content.comm_id === COMM_ID &&
      this._attached
    ) {
      const buffers = message.buffers ?? [];
      this.link.receive(message.content.data as unknown as Incoming, buffers);
      const state = this.link.state === 'gone' ? 'unloaded' : 'loaded';
      if (state !== this.state) {
        this._become(state);
      }
    }
  }

  private _onWords(words: string, session: string): void {
    if (OWN_WORDS.includes(words) && !this._sessions.has(session)) {
      const first = this._sessions.size === 0;
      this._sessions.add(session);
      // Of somebody else's restart nothing else tells: the old kernel may be killed before it says
      // goodbye, and what the new one says first is lost where nobody listens to it yet.
      if (!first || words === 'starting') {
        this._onRestart();
      }
    }
  }

  private _onStatus(_: unknown, status: Kernel.Status): void {
    if (status === 'restarting' || status === 'autorestarting') {
      this.link.restarts();
      this._onRestart();
    } else if (status === 'dead') {
      this._onEnd();
    }
  }

  private _onConnectionStatus(_: unknown, status: Kernel.ConnectionStatus): void {
    if (status === 'connected') {
      void this._attach();
    }
  }

  private _onRestart(): void {
    this._attached = false;
    this._subshell = null;
    this.link.gone();
    this._become('connecting');
    if (this._connection.connectionStatus === 'connected') {
      void this._attach();
    }
  }

  private _onEnd(): void {
    this._attempt += 1;
    if (!this._isDisposed && this.state !== 'ended') {
      this.link.gone();
      this._become('ended');
    }
  }

  /** Find out what the kernel can, and whether the package is loaded in it. */
  private async _attach(): Promise<void> {
    const attempt = ++this._attempt;
    const outdated = () => attempt !== this._attempt;
    const info = await this._ask<KernelMessage.IInfoReply>('kernel_info_request', {}, outdated);
    if (!info) {
      return;
    }
    if (info.language_info?.name !== 'python') {
      this._become('foreign');
      return;
    }
    if (info.supported_features?.includes('kernel subshells')) {
      await this._enterSubshell(outdated);
    }
    if (outdated()) {
      return;
    }
    this._attached = true;
    const found = await this._ask<KernelMessage.ICommInfoReply>(
      'comm_info_request',
      { target_name: TARGET },
      outdated
    );
    if (!found) {
      return;
    }
    if (COMM_ID in found.comms) {
      this.link.hello();
    } else if (this.link.state !== 'ready') {
      this._become('unloaded');
    }
  }

  /** Have a subshell of our own, after a connection that was lost the same one. */
  private async _enterSubshell(outdated: () => boolean): Promise<void> {
    if (this._subshell !== null) {
      const list = await this._ask<{ subshell_id: string[] }>(
        'list_subshell_request',
        {},
        outdated
      );
      if (!list || list.subshell_id.includes(this._subshell)) {
        return;
      }
    }
    const made = await this._ask<{ subshell_id: string }>('create_subshell_request', {}, outdated);
    if (made) {
      this._subshell = made.subshell_id;
    }
  }

  /**
   * Ask on the control channel, which answers while a cell runs, too.
   *
   * Returns null when the answer is no longer of interest.
   */
  private async _ask<T>(
    type: KernelMessage.ControlMessageType | KernelMessage.ShellMessageType,
    content: Record<string, unknown>,
    outdated: () => boolean
  ): Promise<T | null> {
    while (!outdated() && !this._connection.isDisposed && this._connection.status !== 'dead') {
      const future = this._control(type, content);
      let timer: ReturnType<typeof setTimeout> | undefined;
      const late = new Promise<null>(resolve => {
        timer = setTimeout(() => resolve(null), AGAIN_MS);
      });
      const answers: Promise<unknown>[] = [
        late,
        future.done.then(
          reply => reply.content,
          () => late
        )
      ];
      if (type === 'kernel_info_request') {
        // Other kernels may answer it on the shell channel only, where it was asked already.
        answers.push(this._connection.info.catch(() => late));
      }
      const answer = await Promise.race(answers);
      clearTimeout(timer);
      if (answer !== null) {
        return outdated() ? null : (answer as T);
      }
      future.dispose();
    }
    return null;
  }

  private _control(type: string, content: Record<string, unknown>) {
    // Its type says that only some messages may go there; kernels take all of them.
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

  private _greeted(): Promise<void> {
    return new Promise(resolve => {
      const look = () => {
        if (this.state === 'loaded') {
          end();
        }
      };
      const timer = setTimeout(() => {
        this.problem = `${LOAD} was run, but nothing of it was heard. Next: run it in a cell, which shows what it says`;
        end();
      }, HELLO_MS);
      const end = () => {
        clearTimeout(timer);
        this._changed.disconnect(look);
        resolve();
      };
      this._changed.connect(look);
      look();
    });
  }

  private _become(state: KernelState): void {
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
