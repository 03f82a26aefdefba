import { afterEach, beforeEach, expect, test, vi } from 'vitest';

import { StartForm } from '../../src/shared/startForm';
import { FakeKernel } from './kernel';
import { attach, clearPage, press } from './page';

const FIELDS = [
  { name: 'data_workers', kind: 'count', label: 'data workers', default: 2 },
  { name: 'workers', kind: 'count', label: 'workers', default: 0 },
  { name: 'evaluator', kind: 'flag', label: 'evaluator', default: false },
  { name: 'name', kind: 'text', label: 'name', default: 'cluster' },
  { name: 'output', kind: 'text', label: 'variable', default: 'cluster' },
  { name: 'time_limit', kind: 'seconds', label: 'time limit', default: null }
];

let kernel: FakeKernel;

beforeEach(() => {
  vi.useFakeTimers();
  kernel = FakeKernel.connected();
});

afterEach(() => {
  clearPage();
  vi.useRealTimers();
});

const settle = () => vi.advanceTimersByTimeAsync(40);

async function open(onClose?: () => void): Promise<StartForm> {
  const form = attach(new StartForm(kernel.link, { readOnly: false }, () => undefined, onClose));
  kernel.reply({ value: { launchers: [], fields: FIELDS, line: '%tfd_cluster start' } });
  await settle();
  return form;
}

function field(form: StartForm, label: string): HTMLInputElement {
  const { htmlFor } = [...form.node.querySelectorAll('label')].find(
    element => element.textContent === label
  )!;
  return document.getElementById(htmlFor) as HTMLInputElement;
}

test('a cluster without tasks is refused at the field', async () => {
  const form = await open();
  const input = field(form, 'data workers');
  input.value = '0';
  field(form, 'workers').value = '';
  press(form, 'Start');
  expect(kernel.of('command').at(-1)!.command).toBe('launchers');
  expect(input.validationMessage).toBe(
    'A cluster needs at least one task. Enter a number of data workers or workers.'
  );
  field(form, 'workers').value = '1';
  press(form, 'Start');
  expect(input.validationMessage).toBe('');
  expect(kernel.of('command').at(-1)).toMatchObject({ command: 'start' });
});

test('a form that a button has opened gets the focus, and Escape closes it', async () => {
  const close = vi.fn();
  const form = await open(close);
  const input = field(form, 'data workers');
  expect(document.activeElement).toBe(input);
  input.dispatchEvent(new KeyboardEvent('keydown', { key: 'Escape', bubbles: true }));
  expect(close).toHaveBeenCalledOnce();
});

test('the form of a cell does not take the focus', async () => {
  const form = await open();
  expect(form.node.contains(document.activeElement)).toBe(false);
});

test('a form does not take the focus from another element', async () => {
  const other = document.createElement('button');
  document.body.append(other);
  const form = attach(new StartForm(kernel.link, { readOnly: false }, () => undefined, vi.fn()));
  other.focus();
  kernel.reply({ value: { launchers: [], fields: FIELDS, line: '%tfd_cluster start' } });
  await settle();
  expect(form.node.querySelector('input')).not.toBeNull();
  expect(document.activeElement).toBe(other);
});

test('fields other than counts and names are under Advanced', async () => {
  const form = await open();
  const details = form.node.querySelector('details')!;
  const labels = [...form.node.querySelectorAll('label')].map(label => label.textContent);
  const advanced = [...details.querySelectorAll('label')].map(label => label.textContent);
  expect(labels).toEqual(['data workers', 'workers', 'name', 'variable', ...advanced]);
  expect(advanced).toEqual(['evaluator', 'time limit']);
  expect(details.open).toBe(false);
  field(form, 'time limit').value = '-1';
  press(form, 'Start');
  expect(details.open).toBe(true);
});
