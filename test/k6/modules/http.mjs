// k6's requests are synchronous: this thread sleeps while the main thread does
// the request.
import { MessageChannel, parentPort, receiveMessageOnPort } from 'node:worker_threads';

import { Trend } from './metrics.mjs';

const duration = new Trend('http_req_duration');

function request(method, url, body, params = {}) {
  const { port1, port2 } = new MessageChannel();
  const signal = new Int32Array(new SharedArrayBuffer(4));
  const timeout = 1000 * Number.parseFloat(params.timeout ?? '60s');
  const began = performance.now();
  parentPort.postMessage({ request: { method, url, body, headers: params.headers ?? {}, timeout }, port: port2, signal }, [port2]);
  Atomics.wait(signal, 0, 0);
  const { message } = receiveMessageOnPort(port1);
  port1.close();
  duration.add(performance.now() - began);
  return {
    ...message,
    error: message.error ?? '',
    headers: Object.fromEntries(message.headers.map(([name, value]) => [canonical(name), value])),
    json: () => JSON.parse(message.body),
  };
}

const canonical = (name) => name.replace(/(^|-)[a-z]/g, (letter) => letter.toUpperCase());

export default {
  request,
  get: (url, params) => request('GET', url, null, params),
  post: (url, body, params) => request('POST', url, body, params),
  setResponseCallback: () => {},
  expectedStatuses: () => {},
};
