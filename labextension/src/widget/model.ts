// One link per model, shared by all its views.

import { type ITransport, Link } from '../shared/link';
import type { Incoming } from '../shared/protocol';

/** The part of anywidget's model that is used here. */
export interface IModel {
  get(name: string): unknown;
  send(content: unknown): void;
  on(event: string, callback: (...args: never[]) => void): void;
  off(event: string, callback: (...args: never[]) => void): void;
}

interface IShared {
  link: Link;
  views: number;
  end(): void;
}

const shared = new WeakMap<IModel, IShared>();

/** Return the link of `model`; call `release` once after use. */
export function useLink(model: IModel): { link: Link; release: () => void } {
  let entry = shared.get(model);
  if (!entry) {
    entry = createEntry(model);
    shared.set(model, entry);
  }
  const used = entry;
  used.views += 1;
  let open = true;
  return {
    link: used.link,
    release: () => {
      if (open) {
        open = false;
        used.views -= 1;
        if (used.views === 0) {
          shared.delete(model);
          used.end();
        }
      }
    }
  };
}

function createEntry(model: IModel): IShared {
  const transport: ITransport = {
    send: message => {
      try {
        model.send(message);
      } catch {
        // The comm is closed: the kernel has ended, which `comm:close` reports.
      }
    },
    get concurrent() {
      return model.get('concurrent') !== false;
    },
    get hint() {
      return text(model.get('hint')) || undefined;
    }
  };
  const link = new Link(transport, text(model.get('version')));
  const receive = (message: Incoming, buffers: DataView[]) => link.receive(message, buffers);
  const ended = () => link.disconnect();
  // comm_live_update is also sent when the comm is reopened.
  const reconnect = () => {
    link.disconnect();
    link.hello();
  };
  // The hello message has the new value, because queued messages cannot be acknowledged in time.
  const concurrencyChanged = () => link.hello();
  const handlers: [string, (...args: never[]) => void][] = [
    ['change:concurrent', concurrencyChanged],
    ['msg:custom', receive],
    ['comm:close', ended],
    ['destroy', ended],
    ['comm_live_update', reconnect]
  ];
  for (const [event, handler] of handlers) {
    model.on(event, handler);
  }
  link.hello();
  return {
    link,
    views: 0,
    end: () => {
      for (const [event, handler] of handlers) {
        model.off(event, handler);
      }
      link.dispose();
    }
  };
}

function text(value: unknown): string {
  return typeof value === 'string' ? value : '';
}
