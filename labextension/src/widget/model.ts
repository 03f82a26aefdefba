// One link for each model, however many views of it there are.

import { type ITransport, Link } from '../shared/link';
import type { Incoming } from '../shared/protocol';

/** What anywidget gives of a model. */
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

/** The link of `model`; `release` has to be called once. */
export function useLink(model: IModel): { link: Link; release: () => void } {
  let mine = shared.get(model);
  if (!mine) {
    mine = begin(model);
    shared.set(model, mine);
  }
  const used = mine;
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

function begin(model: IModel): IShared {
  const transport: ITransport = {
    send: message => {
      try {
        model.send(message);
      } catch {
        // The comm is closed: the kernel has ended, which is told below.
      }
    },
    get beside() {
      return model.get('beside') !== false;
    },
    get hint() {
      return text(model.get('hint')) || undefined;
    }
  };
  const link = new Link(transport, text(model.get('version')));
  const receive = (message: Incoming, buffers: DataView[]) => link.receive(message, buffers);
  const ended = () => link.gone();
  // Also told when the comm is back: whoever is there answers.
  const changed = () => {
    link.gone();
    link.hello();
  };
  // Where messages wait, nobody can tell in time what was seen.
  const otherwise = () => link.hello();
  const handlers: [string, (...args: never[]) => void][] = [
    ['change:beside', otherwise],
    ['msg:custom', receive],
    ['comm:close', ended],
    ['destroy', ended],
    ['comm_live_update', changed]
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
