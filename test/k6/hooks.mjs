// Makes `import … from 'k6/…'` find the stand-ins, and takes the script for a
// module, which k6 does without a package.json.
import { readFile } from 'node:fs/promises';
import { fileURLToPath } from 'node:url';

export async function resolve(specifier, context, next) {
  const name = /^k6(?:\/(\w+))?$/.exec(specifier);
  if (!name) return next(specifier, context);
  return { url: new URL(`./modules/${name[1] ?? 'k6'}.mjs`, import.meta.url).href, shortCircuit: true };
}

export async function load(url, context, next) {
  if (!url.endsWith('.js')) return next(url, context);
  return { format: 'module', source: await readFile(fileURLToPath(url)), shortCircuit: true };
}
