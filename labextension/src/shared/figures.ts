// Symbols and number formats, identical to those of the kernel's text views.

const STATES: Record<string, string[]> = {
  '○': ['new', 'planned', 'idle', 'queued', 'reserved', 'own'],
  '◌': ['starting', 'dispatched', 'stopping', 'reserving', 'draining'],
  '●': ['ready', 'alive'],
  '►': ['running', 'fetching', 'feeding'],
  '‖': ['paused'],
  '↻': ['retrying', 'restarting'],
  '■': ['cancelled', 'stopped'],
  '▲': ['degraded', 'hung', 'warning'],
  '✓': ['finished'],
  '✗': ['failed', 'refused', 'foreign', 'error'],
  '∅': ['lost', 'unreachable'],
  '≠': ['mismatch'],
  '·': ['info']
};
const SIGNS = new Map(
  Object.entries(STATES).flatMap(([sign, states]) => states.map(state => [state, sign]))
);

const TONES: Record<string, string[]> = {
  good: ['ready', 'running', 'fetching', 'finished', 'alive', 'own', 'feeding'],
  warn: ['hung', 'degraded', 'restarting', 'retrying', 'warning'],
  bad: ['failed', 'lost', 'error', 'refused', 'unreachable', 'foreign', 'mismatch']
};

const MAX_ERROR = 400;
/** Prefixes of the lines of TensorFlow errors that give locations, not causes. */
const STACK = [
  'Graph execution error',
  'Detected at node',
  'File ',
  'Additional GRPC error information',
  ':UNKNOWN:',
  '[[{{node',
  'Function call stack'
];

export function sign(state: string): string {
  return SIGNS.get(state) ?? '·';
}

export function signed(state: string): string {
  return `${sign(state)} ${state}`;
}

export function tone(state: string): string {
  return Object.keys(TONES).find(name => TONES[name].includes(state)) ?? 'quiet';
}

function grouped(number: number): string {
  return Math.round(number)
    .toString()
    .replace(/\B(?=(\d{3})+$)/g, ',');
}

/** Format a count: 950, 12,345, 1.2 M. */
export function count(number: number): string {
  for (const [limit, unit] of [
    [1e12, 'T'],
    [1e9, 'G'],
    [1e6, 'M']
  ] as const) {
    if (number >= limit) {
      return `${(number / limit).toFixed(1)} ${unit}`;
    }
  }
  return number >= 10 || Number.isInteger(number) ? grouped(number) : number.toFixed(1);
}

/** Format a count with all its digits. */
export const formatInteger = grouped;

/** Format bytes in decimal units. */
export function size(bytes: number | undefined): string {
  if (bytes === undefined) {
    return '';
  }
  for (const [limit, unit] of [
    [1e12, 'TB'],
    [1e9, 'GB'],
    [1e6, 'MB'],
    [1e3, 'kB']
  ] as const) {
    if (bytes >= limit * 0.9995) {
      const scaled = bytes / limit;
      return `${scaled.toFixed(scaled < 99.95 ? 1 : 0)} ${unit}`;
    }
  }
  return `${bytes.toFixed(0)} B`;
}

export function rate(bytes: number | undefined): string {
  return bytes === undefined ? '' : `${size(bytes)}/s`;
}

export function percent(number: number | undefined): string {
  return number === undefined ? '' : `${number.toFixed(0)} %`;
}

/** Format a duration in s, min or h: 40 s, 58 min, 3.5 h. */
export function duration(seconds: number): string {
  if (seconds < 100) {
    return `${Math.max(seconds, 0).toFixed(0)} s`;
  }
  return seconds < 6000 ? `${(seconds / 60).toFixed(0)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

/** Format a duration of any length: 0.2 ms, 35 ms, 4.2 s, 58 min. Unknown durations are empty. */
export function brief(seconds: number): string {
  if (!Number.isFinite(seconds)) {
    return '';
  }
  if (seconds < 0.9995) {
    const ms = seconds * 1e3;
    return `${ms.toFixed(ms < 9.95 ? 1 : 0)} ms`;
  }
  return seconds < 9.95 ? `${seconds.toFixed(1)} s` : duration(seconds);
}

/** Format seconds since the Unix epoch as a time of day. */
export function clock(seconds: number, digits = 0): string {
  const date = new Date(seconds * 1e3);
  const two = (number: number) => String(number).padStart(2, '0');
  const text = `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  const rest = String(date.getMilliseconds()).padStart(3, '0').slice(0, digits);
  return digits ? `${text}.${rest}` : text;
}

/** Return the text as one line. */
export function clean(text: string): string {
  return text.replace(/\s+/g, ' ').trim();
}

/** Return the message of a TensorFlow error without its stack traces. */
export function errorSummary(error: string): string {
  const lines = error
    .slice(0, 20_000)
    .replace(/\{\{function_node [^{}]*\}\} ?/g, '')
    .split('\n')
    .map(line => line.trim())
    .filter(line => line && !STACK.some(start => line.startsWith(start)));
  const joined = clean(lines.slice(0, 3).join(' ')) || clean(error.slice(0, MAX_ERROR));
  // The previous line may not end with punctuation.
  const text = joined.replace(/([^\s.!?:;,]) Next: /g, '$1. Next: ');
  return text.length <= MAX_ERROR ? text : `${text.slice(0, MAX_ERROR - 1)}…`;
}

/** Format counts by state; zeros are omitted. */
export function counted(counts: Record<string, number>): string {
  return Object.entries(counts)
    .filter(([, number]) => number)
    .map(([state, number]) => `${grouped(number)} ${state}`)
    .join(', ');
}

/** Return the sum of numbers; 0 without any. */
export function sum(numbers: readonly number[]): number {
  return numbers.reduce((all, number) => all + number, 0);
}

/** Return the sum of all counts. */
export function total(counts: Record<string, number>): number {
  return sum(Object.values(counts));
}

/** Return a count with its noun: `1 task`, `2 tasks`. */
export function plural(number: number, thing: string): string {
  return `${grouped(number)} ${thing}${number === 1 ? '' : 's'}`;
}
