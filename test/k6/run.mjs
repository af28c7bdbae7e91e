// Runs a k6 script without k6: the script as it is, on a stand-in for the few
// k6 modules it uses (modules/). Each VU is a thread; checks and thresholds
// count as in k6. It is there so that the script's logic is tested where k6 is
// not, and measures nothing that is worth quoting.
//
//   node test/k6/run.mjs load/k6/smoke.js
import { once } from 'node:events';
import { resolve } from 'node:path';
import { pathToFileURL } from 'node:url';
import { Worker } from 'node:worker_threads';

const script = pathToFileURL(resolve(process.argv[2])).href;
const checks = {};
const samples = {}; // metric: its values
let options;

// run runs one function of the script in a thread of its own and gives back
// what it returned.
async function run(phase, vu, data) {
  const worker = new Worker(new URL('./vu.mjs', import.meta.url), { workerData: { script, phase, vu, data } });
  const served = [];
  worker.on('message', (message) => {
    if (message.request) served.push(serve(message));
  });
  let result;
  worker.on('message', (message) => {
    if (message.done) result = message.done;
  });
  const failed = new Promise((_, reject) => { worker.once('error', reject); });
  await Promise.race([once(worker, 'exit'), failed]);
  await Promise.all(served);
  if (!result) throw new Error(`${phase} of VU ${vu} ended without a result`);
  options = result.options;
  for (const [name, { passes, fails }] of Object.entries(result.checks)) {
    const total = checks[name] ??= { passes: 0, fails: 0 };
    total.passes += passes;
    total.fails += fails;
  }
  for (const [name, values] of Object.entries(result.samples)) (samples[name] ??= []).push(...values);
  if (result.error) throw new Error(`${phase} of VU ${vu}: ${result.error}`);
  return result.returned;
}

// serve does a request for a VU that waits for it.
async function serve({ request, port, signal }) {
  let response;
  try {
    const answer = await fetch(request.url, {
      method: request.method, headers: request.headers, body: request.body ?? undefined,
      signal: AbortSignal.timeout(request.timeout),
    });
    response = { status: answer.status, body: await answer.text(), headers: [...answer.headers] };
  } catch (error) {
    response = { status: 0, body: '', headers: [], error: String(error.cause ?? error) };
  }
  port.postMessage(response);
  Atomics.store(signal, 0, 1);
  Atomics.notify(signal, 0);
}

// met evaluates a threshold such as "rate==1" or "p(95)<500".
function met(values, expression) {
  const [, aggregate, percent, comparison, bound] =
    /^(?:(rate|count|avg|min|max|med)|p\((\d+)\))\s*(===?|!=|<=|>=|<|>)\s*([\d.]+)$/.exec(expression);
  const sorted = [...values].sort((a, b) => a - b);
  const sum = sorted.reduce((total, value) => total + value, 0);
  const at = (part) => sorted[Math.max(0, Math.ceil(part * sorted.length) - 1)];
  const value = {
    rate: sum / sorted.length, avg: sum / sorted.length, count: sum,
    min: sorted[0], max: sorted.at(-1), med: at(0.5),
  }[aggregate] ?? at(percent / 100);
  const operators = {
    '<': (a, b) => a < b, '<=': (a, b) => a <= b, '>': (a, b) => a > b, '>=': (a, b) => a >= b,
    '==': (a, b) => a === b, '===': (a, b) => a === b, '!=': (a, b) => a !== b,
  };
  return { value, ok: sorted.length > 0 && operators[comparison](value, Number(bound)) };
}

let failed = false;
try {
  const data = await run('setup', 0);
  const [{ vus, iterations }] = Object.values(options.scenarios);
  console.log(`${vus} VUs, ${iterations} iterations each`);
  await Promise.all(Array.from({ length: vus }, (_, i) => run('default', i + 1, { setup: data, iterations })));
  await run('teardown', 0, data);
} catch (error) {
  console.error(String(error.stack ?? error));
  failed = true;
}
for (const [name, { passes, fails }] of Object.entries(checks)) {
  console.log(`${fails === 0 ? '✓' : '✗'} ${name}: ${passes} of ${passes + fails}`);
}
samples.checks = Object.values(checks).flatMap(({ passes, fails }) => [...Array(passes).fill(1), ...Array(fails).fill(0)]);
for (const [name, expressions] of Object.entries(options?.thresholds ?? {})) {
  for (const expression of expressions) {
    const { value, ok } = met(samples[name] ?? [], expression);
    console.log(`${ok ? '✓' : '✗'} ${name} ${expression} (${value}, ${samples[name]?.length ?? 0} samples)`);
    failed ||= !ok;
  }
}
process.exit(failed ? 1 : 0);
