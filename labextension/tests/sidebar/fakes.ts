// Fakes of a kernel connection and of the service manager.

import { type Kernel, KernelMessage, type Session } from '@jupyterlab/services';
import { Signal } from '@lumino/signaling';

import { PROTOCOL } from '../../src/shared/protocol';
import type { IServices } from '../../src/sidebar/kernels';
import { COMM_ID, type Connection } from '../../src/sidebar/kernelClient';

type Data = Record<string, any>;

/** A fake of a kernel connection. */
export class FakeConnection implements Connection {
  clientId = 'me';
  id = 'kernel';
  username = '';
  status: Kernel.Status = 'idle';
  connectionStatus: Kernel.ConnectionStatus = 'connected';
  isDisposed = false;
  info: Promise<any> = new Promise(() => undefined);
  connectionStatusChanged = new Signal<any, Kernel.ConnectionStatus>(this);
  disposed = new Signal<any, void>(this);
  iopubMessage = new Signal<any, KernelMessage.IIOPubMessage>(this);
  statusChanged = new Signal<any, Kernel.Status>(this);

  /** Properties of the fake kernel. */
  pid = 1;
  language = 'python';
  subshells: string[] | null = [];
  loaded = false;
  replies = true;
  loadError: Data | null = null;
  clusters: Data = {};
  /** Messages received over the bus and on the control channel. */
  received: Data[] = [];
  controlled: string[] = [];
  lastSubshell: string | null = null;
  private _seq = 0;
  private _known = new Set<string>();

  dispose(): void {
    this.isDisposed = true;
    this.disposed.emit();
  }

  sendControlMessage(message: any): any {
    this.controlled.push(message.header.msg_type);
    return future(this.replies ? this._control(message.header.msg_type, message.content) : null);
  }

  sendShellMessage(message: any): any {
    const { data } = message.content;
    this.lastSubshell = message.header.subshell_id;
    this.received.push(data);
    if (data.kind === 'hello') {
      this._known.add(data.client);
      this.hello(data.client);
      this.publish({ kind: 'state', full: true, state: { clusters: this.clusters } });
    }
    return future({});
  }

  requestExecute(): any {
    if (this.loadError) {
      return future({ status: 'error', ...this.loadError });
    }
    queueMicrotask(() => this.load());
    return future({ status: 'ok' });
  }

  load(): void {
    this.loaded = true;
    this.hello();
  }

  hello(known?: string): void {
    this.post({ kind: 'hello', protocol: PROTOCOL, version: '0.1.0', pid: this.pid, known });
  }

  /** Send a numbered message. */
  publish(data: Data): void {
    this.post({ ...data, seq: ++this._seq });
  }

  /** Simulate a restart by another client; the first status message may be lost. */
  restart(status = 'starting'): void {
    this.pid += 1;
    this.loaded = false;
    this.clusters = {};
    this._seq = 0;
    this._known.clear();
    this.subshells &&= [];
    this.emit('status', { execution_state: status });
  }

  end(): void {
    this.status = 'dead';
    this.statusChanged.emit('dead');
    this.dispose();
  }

  post(data: Data): void {
    this.emit('comm_msg', { comm_id: COMM_ID, data });
  }

  emit(type: string, content: Data): void {
    this.iopubMessage.emit(
      KernelMessage.createMessage({
        msgType: type as 'status',
        channel: 'iopub',
        session: `process ${this.pid}`,
        content: content as any
      })
    );
  }

  private _control(type: string, content: Data): Data {
    switch (type) {
      case 'kernel_info_request':
        return {
          language_info: { name: this.language },
          supported_features: this.subshells ? ['kernel subshells'] : []
        };
      case 'create_subshell_request': {
        const name = `shell of ${this.pid}`;
        this.subshells!.push(name);
        return { subshell_id: name };
      }
      case 'list_subshell_request':
        return { subshell_id: this.subshells };
      case 'delete_subshell_request':
        this.subshells = this.subshells!.filter(name => name !== content.subshell_id);
        return {};
      default:
        return { comms: this.loaded ? { [COMM_ID]: { target_name: 'tfd_notebook' } } : {} };
    }
  }
}

/** A fake of the service manager with the sessions of `run`. */
export class FakeServices implements IServices {
  connections = new Map<string, FakeConnection>();
  connectOptions: Kernel.IKernelConnection.IOptions[] = [];
  models: Session.IModel[] = [];
  kernelspecs = { specs: null };
  kernels = {
    connectTo: (options: Kernel.IKernelConnection.IOptions): Connection => {
      this.connectOptions.push(options);
      const { id } = options.model;
      const connection = this.connections.get(id) ?? new FakeConnection();
      this.connections.set(id, connection);
      return connection;
    }
  };
  sessions = {
    ready: Promise.resolve(),
    running: () => this.models[Symbol.iterator](),
    runningChanged: new Signal<any, Session.IModel[]>(this)
  };

  /** Replace the running sessions: path and id of the kernel. */
  run(...running: [path: string, id: string, type?: string][]): void {
    this.models = running.map(([path, id, type = 'notebook']) => ({
      id: `session of ${path}`,
      path,
      name: path,
      type,
      kernel: { id, name: 'python3' }
    }));
    this.sessions.runningChanged.emit(this.models);
  }
}

export function cluster(name: string, state = 'ready'): Data {
  return {
    name,
    launcher: 'local',
    state,
    planned: {},
    requested: {},
    observed: {},
    tasks: {},
    order: [],
    streams: {},
    notices: []
  };
}

function future(content: Data | null): any {
  const done = content ? Promise.resolve({ content }) : new Promise(() => undefined);
  return { done, dispose: () => undefined };
}
