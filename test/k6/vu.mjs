// One VU: imports the script in a thread of its own and runs one phase of it.
import { readFileSync } from 'node:fs';
import { register } from 'node:module';
import { parentPort, workerData } from 'node:worker_threads';

const { script, phase, vu, data } = workerData;
globalThis.__ENV = process.env;
globalThis.open = (path) => readFileSync(new URL(path, script), 'utf8');
globalThis.vu = { id: vu, iteration: 0, checks: {}, samples: {} };

register('./hooks.mjs', import.meta.url);
const module = await import(script);

const result = { options: module.options, returned: undefined, error: undefined };
try {
  if (phase === 'default') {
    for (globalThis.vu.iteration = 0; globalThis.vu.iteration < data.iterations; globalThis.vu.iteration++) {
      module.default(data.setup);
    }
  } else {
    result.returned = module[phase]?.(data);
  }
} catch (error) {
  result.error = String(error.stack ?? error);
}
result.checks = globalThis.vu.checks;
result.samples = globalThis.vu.samples;
parentPort.postMessage({ done: JSON.parse(JSON.stringify(result)) }); // as k6 hands data from phase to phase
