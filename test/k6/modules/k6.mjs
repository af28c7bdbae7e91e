export function check(value, conditions) {
  let all = true;
  for (const [name, holds] of Object.entries(conditions)) {
    const counts = globalThis.vu.checks[name] ??= { passes: 0, fails: 0 };
    if (holds(value)) {
      counts.passes++;
    } else {
      counts.fails++;
      all = false;
    }
  }
  return all;
}

export function fail(reason) {
  throw new Error(reason);
}

export function sleep(seconds) {
  Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, seconds * 1000);
}
