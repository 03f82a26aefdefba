import './lumino';

import { Signal } from '@lumino/signaling';
import { Widget } from '@lumino/widgets';
import { afterEach, beforeEach, expect, test, vi } from 'vitest';

import { Detached } from '../../src/sidebar/detached';
import { type IKernel, Kernels } from '../../src/sidebar/kernels';
import { ClustersPanel } from '../../src/sidebar/panel';
import { DEFAULTS, type IClusters } from '../../src/sidebar/tokens';
import { cluster, FakeConnection, FakeServices } from './fakes';

Element.prototype.scrollIntoView = () => undefined;

class FakeClusters {
  settings = DEFAULTS;
  settingsChanged = new Signal<any, void>(this);
  activeKernel: IKernel | undefined;
  activeChanged = new Signal<any, void>(this);
  detached = new Detached(() => Promise.resolve(null));

  constructor(readonly kernels: Kernels) {}

  actions() {
    return { readOnly: false };
  }

  activate(path: string): void {
    this.activeKernel = this.kernels.find('', path);
    this.activeChanged.emit();
  }
}

let services: FakeServices;
let clusters: FakeClusters;
let panel: ClustersPanel;

const settle = () => vi.advanceTimersByTimeAsync(300);

beforeEach(async () => {
  sessionStorage.clear();
  vi.useFakeTimers();
  services = new FakeServices();
  clusters = new FakeClusters(new Kernels(services, '0.1.0'));
  panel = new ClustersPanel(clusters as unknown as IClusters);
  Widget.attach(panel, document.body);
  for (const name of ['a', 'b', 'c']) {
    const connection = new FakeConnection();
    connection.loaded = true;
    connection.clusters = name === 'c' ? {} : { [name]: cluster(name) };
    services.connections.set(name, connection);
  }
  services.run(['a.ipynb', 'a'], ['b.ipynb', 'b'], ['c.ipynb', 'c'], ['d.ipynb', 'd']);
  await settle();
});

afterEach(() => {
  panel.dispose();
  clusters.kernels.dispose();
  clusters.detached.dispose();
  vi.useRealTimers();
});

const kernelNames = () =>
  [
    ...panel.node.querySelectorAll(
      '.tfd-lab-kernel:not(.tfd-lab-detached) .tfd-lab-title > :first-child'
    )
  ].map(name => name.textContent);

const toggle = (name: string) =>
  [...panel.node.querySelectorAll<HTMLElement>('.tfd-lab-fold')].find(button =>
    button.textContent.startsWith(name)
  )!;

const expanded = () =>
  ['a', 'b'].filter(name => toggle(name).getAttribute('aria-expanded') === 'true');

/** Activate the notebook with this path, and draw the panel. */
async function activate(path: string): Promise<void> {
  clusters.activate(path);
  await settle();
}

test('the kernel of the active notebook comes first', async () => {
  expect(kernelNames()).toEqual(['a.ipynb', 'b.ipynb', 'c.ipynb', 'd.ipynb']);
  await activate('b.ipynb');
  expect(kernelNames()).toEqual(['b.ipynb', 'a.ipynb', 'c.ipynb', 'd.ipynb']);
  // Another document, without a kernel here, changes nothing.
  await activate('readme.md');
  expect(kernelNames()[0]).toBe('b.ipynb');
  // A cluster that starts does not move its kernel.
  const connection = services.connections.get('c')!;
  connection.publish({ kind: 'state', full: true, state: { clusters: { c: cluster('c') } } });
  await settle();
  expect(toggle('c')).toBeDefined();
  expect(kernelNames()).toEqual(['b.ipynb', 'a.ipynb', 'c.ipynb', 'd.ipynb']);
});

test('clusters of the active notebook are expanded', async () => {
  expect(expanded()).toEqual(['a', 'b']);
  await activate('b.ipynb');
  expect(expanded()).toEqual(['b']);
  expect(panel.folds).toEqual({});
  const view = panel.node.querySelectorAll<HTMLElement>('.tfd-cluster');
  expect([...view].map(node => node.hidden)).toEqual([false, true]);
  await activate('a.ipynb');
  expect(expanded()).toEqual(['a']);
});

test('a fold of the user is kept until it is the default again', async () => {
  const changed = vi.fn();
  panel.foldsChanged.connect(changed);
  await activate('b.ipynb');
  toggle('a').click();
  toggle('b').click();
  expect(expanded()).toEqual(['a']);
  expect(panel.folds).toEqual({ 'a.ipynb:a': false, 'b.ipynb:b': true });
  await activate('a.ipynb');
  await activate('b.ipynb');
  expect(expanded()).toEqual(['a']);
  toggle('a').click();
  toggle('b').click();
  expect(panel.folds).toEqual({});
  expect(changed).toHaveBeenCalledTimes(4);
  panel.folds = { 'b.ipynb:b': true };
  await settle();
  expect(expanded()).toEqual([]);
});

test('the message of a started cluster disappears, and the form replaces its hint', async () => {
  services.run(['c.ipynb', 'c']);
  await settle();
  const hint = [...panel.node.querySelectorAll('p')].find(element =>
    element.textContent.startsWith('Press Start cluster')
  )!;
  expect(hint.hidden).toBe(false);
  panel.start('c');
  await settle();
  expect(hint.hidden).toBe(true);
  const connection = services.connections.get('c')!;
  const reply = (value: unknown) => {
    const { client, request_id } = connection.received
      .filter(({ kind }) => kind === 'command')
      .at(-1)!;
    connection.post({ kind: 'reply', client, request_id, value });
    return settle();
  };
  const count = { name: 'workers', kind: 'count', label: 'workers', default: 1 };
  await reply({ launchers: [], fields: [count], line: '%tfd_cluster start' });
  panel.node.querySelector<HTMLElement>('.tfd-start [type=submit]')!.click();
  await reply({ cluster: 'c', variable: 'c', line: '%tfd_cluster start', reused: false });
  const message = panel.node.querySelector<HTMLElement>('.tfd-lab-words.tfd-good')!;
  expect(message.textContent).toContain('Cluster c was started.');
  expect([message.hidden, hint.hidden]).toEqual([false, false]);
  await vi.advanceTimersByTimeAsync(30_000);
  expect(message.hidden).toBe(true);
});

test('Escape closes the form and returns to its button', async () => {
  panel.start('c');
  await settle();
  const form = panel.node.querySelector('.tfd-start form')!;
  form.dispatchEvent(new KeyboardEvent('keydown', { key: 'Escape', bubbles: true }));
  expect(panel.node.querySelector('.tfd-start')).toBeNull();
  expect(document.activeElement?.textContent).toBe('Start cluster');
});

test('an ended cluster can be dismissed until it starts again', async () => {
  services.run(['a.ipynb', 'a']);
  await settle();
  const connection = services.connections.get('a')!;
  const update = (state: string) => {
    connection.publish({
      kind: 'state',
      full: true,
      state: { clusters: { a: cluster('a', state) } }
    });
    return settle();
  };
  const dismiss = () =>
    [...panel.node.querySelectorAll<HTMLElement>('.tfd-lab-line > .tfd-link')].find(
      button => !button.hidden
    );
  const empty = panel.node.querySelector<HTMLElement>('.tfd-lab-empty')!;
  expect(dismiss()).toBeUndefined();
  await update('failed');
  expect(empty.hidden).toBe(true);
  dismiss()!.click();
  await settle();
  expect(toggle('a')).toBeUndefined();
  expect(empty.hidden).toBe(false);
  await update('stopped');
  expect(toggle('a')).toBeUndefined();
  await update('starting');
  expect(toggle('a')).toBeDefined();
  await update('failed');
  expect(toggle('a')).toBeDefined();
});
