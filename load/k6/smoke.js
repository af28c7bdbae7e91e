// The smoke test: orders are made, paid, refunded and cancelled by several
// clients at once; each waits until its order's receipt is complete, and at the
// end the books are checked against what the orders say. README.md beside this
// file has the variables.
import http from 'k6/http';
import exec from 'k6/execution';
import { check, fail, sleep } from 'k6';
import { Counter, Trend } from 'k6/metrics';

const base = (__ENV.BASE_URL || 'http://127.0.0.1:8080').replace(/\/$/, '');
const key = __ENV.API_KEY || open(__ENV.API_KEY_FILE || '../../.onceledger/api-key').trim();
const alone = __ENV.ALONE !== 'no';
const number = (name, standard) => Number(__ENV[name] || standard);

export const options = {
  scenarios: {
    smoke: {
      executor: 'per-vu-iterations',
      vus: number('VUS', 5),
      iterations: number('ITERATIONS', 10),
      maxDuration: '10m',
    },
  },
  thresholds: {
    checks: ['rate==1'],
    order_complete_ms: [`p(95)<${number('MAX_COMPLETE_MS', 5000)}`],
  },
  setupTimeout: '1m',
  teardownTimeout: '5m',
};

const completeAfter = new Trend('order_complete_ms', true); // from the last POST to a complete receipt
const orders = new Counter('orders');
const repeats = new Counter('requests_sent_again');

// What is refused on purpose is no failure.
http.setResponseCallback(http.expectedStatuses({ min: 200, max: 299 }, 422));

// A total with a remainder in each, and minor units of 2, 0 and 3 decimals.
const baskets = [
  { currency: 'EUR', lines: [line('book', 2, 1250, '0.19'), line('tea', 3, 333, '0.07')] },
  { currency: 'JPY', lines: [line('poster', 1, 999, '0.1')] },
  { currency: 'KWD', lines: [line('chair', 7, 12345, '0.05'), line('gift', 1, 0, '0')] },
];

function line(sku, quantity, unitAmount, taxRate) {
  return { sku, description: `One ${sku}`, quantity, unit_amount: unitAmount, tax_rate: taxRate };
}

export function setup() {
  for (let tries = 0; get('/readyz', [200, 503]).status !== 200; tries++) {
    if (tries === 60) fail(`${base} is not ready`);
    sleep(1);
  }
  const newest = get('/v1/orders?limit=1').json().orders;
  return {
    run: `smoke-${Date.now()}-${Math.floor(Math.random() * 1e9)}`,
    newest: newest.length > 0 ? newest[0].id : '',
    balances: balances(),
  };
}

export default function (data) {
  const iteration = exec.vu.iterationInScenario;
  const name = `${data.run}-${exec.vu.idInTest}-${iteration}`;
  const basket = baskets[iteration % baskets.length];

  const order = post('/v1/orders', `${name}-create`, {
    customer_id: `c-${exec.vu.idInTest}`,
    customer_email: `customer-${exec.vu.idInTest}@example.com`,
    currency: basket.currency,
    lines: basket.lines,
    metadata: { run: data.run },
  }, 201).json();
  orders.add(1);
  const path = `/v1/orders/${order.id}`;
  check(order, { 'total is net and tax': (o) => o.total_amount === o.net_amount + o.tax_amount });

  if (iteration % 5 === 4) {
    post(`${path}/cancel`, `${name}-cancel`, {}, 200);
  } else {
    const pay = { payment_reference: name };
    const first = post(`${path}/pay`, `${name}-pay`, pay, 200);
    const second = post(`${path}/pay`, `${name}-pay`, pay, 200);
    check(second, {
      'the same key gets the same answer': (r) => r.body === first.body,
      'and it says so': (r) => r.headers['Idempotency-Replayed'] === 'true',
    });
    let left = order.total_amount;
    for (let i = 0; i < iteration % 3; i++) {
      const amount = i === 1 ? left : Math.ceil(left / 3);
      post(`${path}/refunds`, `${name}-refund-${i}`, { amount, reason: 'damaged' }, 201);
      left -= amount;
    }
    post(`${path}/refunds`, `${name}-too-much`, { amount: left + 1, reason: 'too much' }, 422);
  }

  const asked = Date.now();
  const receipt = waitComplete(order.id);
  completeAfter.add(Date.now() - asked);
  checkReceipt(receipt);
}

// teardown looks at every order of this run again, and at the balances.
export function teardown(data) {
  const { ours, others } = ordersSince(data);
  check(ours, { 'the run made orders': (list) => list.length > 0 });

  const expected = {};
  const count = (account, currency, amount) => {
    const at = `${account} ${currency}`;
    expected[at] = (expected[at] || 0) + amount;
  };
  for (const order of ours) {
    const receipt = waitComplete(order.id);
    checkReceipt(receipt);
    if (order.status !== 'paid') continue;
    const back = { net: sum(receipt.credit_notes, 'net_amount'), tax: sum(receipt.credit_notes, 'tax_amount') };
    count('cash', order.currency, order.total_amount - order.refunded_amount);
    count('revenue', order.currency, order.net_amount - back.net);
    count('tax-payable', order.currency, order.tax_amount - back.tax);
  }

  const trial = get('/v1/ledger/trial-balance').json();
  check(trial, { 'every currency balances': (t) => t.totals.every((total) => total.balanced) });
  if (!alone || others > 0) {
    console.log(`${others} orders of others in between: the balances are not compared`);
    return;
  }
  const now = balances();
  for (const [account, amount] of Object.entries(expected)) {
    const moved = (now[account] || 0) - (data.balances[account] || 0);
    if (!check(moved, { 'the accounts moved by what the orders say': (m) => m === amount })) {
      console.error(`${account} moved by ${moved}, the orders say ${amount}`);
    }
  }
}

function ordersSince(data) {
  const ours = [];
  let others = 0;
  let cursor = '';
  for (;;) {
    const page = get(`/v1/orders?limit=100${cursor && `&cursor=${cursor}`}`).json();
    for (const order of page.orders) {
      if (order.id === data.newest) return { ours, others };
      if (order.metadata.run === data.run) ours.push(order);
      else others++;
    }
    if (!page.next_cursor) return { ours, others };
    cursor = page.next_cursor;
  }
}

function balances() {
  const found = {};
  for (const account of get('/v1/ledger/trial-balance').json().accounts) {
    found[`${account.account} ${account.currency}`] = account.balance_amount;
  }
  return found;
}

function waitComplete(id) {
  for (let tries = 0; ; tries++) {
    const receipt = get(`/v1/orders/${id}/receipt`).json();
    if (receipt.complete) return receipt;
    if (receipt.dead_letters.length > 0 || tries > 600) fail(`order ${id} still waits for ${receipt.waits_for}`);
    sleep(0.1);
  }
}

// checkReceipt: one order, its events without a gap, and exactly the documents
// and entries that they call for.
function checkReceipt({ order, events, invoice, credit_notes: notes, ledger_entries: entries, dead_letters: dead }) {
  const paid = order.status === 'paid';
  const versions = events.filter((e) => e.topic === 'order.events').map((e) => e.version);
  const payments = entries.filter((e) => e.kind === 'payment');
  const refunds = entries.filter((e) => e.kind === 'refund');
  const cash = (side) => sum(entries.flatMap((e) => e.lines).filter((l) => l[side] === 'cash'), 'amount');
  const right = check(order, {
    'versions have no gap': () => versions.length === order.version && versions.every((v, i) => v === i + 1),
    'a paid order has one invoice': () => (invoice !== null) === paid,
    'a paid order has one payment entry': () => payments.length === (paid ? 1 : 0),
    'the invoice is the total': () => !paid || invoice.total_amount === order.total_amount,
    'each refund has a credit note and an entry': () => notes.length === refunds.length,
    'the credit notes are what was refunded': () => sum(notes, 'total_amount') === order.refunded_amount,
    'cash got what was paid': () => cash('debit_account') === (paid ? order.total_amount : 0),
    'cash gave what was refunded': () => cash('credit_account') === order.refunded_amount,
    'no dead letters': () => dead.length === 0,
  });
  if (!right) console.error(`order ${order.id} is not right`);
}

function sum(list, field) {
  return list.reduce((total, item) => total + item[field], 0);
}

function post(path, idempotencyKey, body, status) {
  return send('POST', path, JSON.stringify(body), [status], {
    'Content-Type': 'application/json',
    'Idempotency-Key': idempotencyKey,
  });
}

function get(path, statuses = [200]) {
  return send('GET', path, null, statuses, {});
}

// send asks until there is an answer. No answer, 503 and "in progress" mean that
// it is not known whether it was done: the same request, with the same key, is
// then the one thing to send.
function send(method, path, body, statuses, headers) {
  for (let tries = 0; ; tries++) {
    const response = http.request(method, `${base}${path}`, body, {
      headers: { Authorization: `Bearer ${key}`, ...headers },
      tags: { name: `${method} ${path.replace(/[0-9a-f-]{36}/, ':id').replace(/\?.*/, '')}` },
      timeout: '20s',
    });
    const unknown = response.status === 0 || response.status === 503 ||
      (response.status === 409 && response.body.includes('request-in-progress'));
    if (!unknown || statuses.includes(response.status) || tries === 100) {
      const expected = check(response, { 'the status is the expected one': (r) => statuses.includes(r.status) });
      if (!expected) fail(`${method} ${path}: ${response.status} ${response.error} ${response.body}`);
      return response;
    }
    repeats.add(1);
    sleep(0.2);
  }
}
