class Metric {
  constructor(name) {
    this.name = name;
  }

  add(value) {
    (globalThis.vu.samples[this.name] ??= []).push(Number(value));
  }
}

export { Metric as Counter, Metric as Gauge, Metric as Rate, Metric as Trend };
