export default {
  vu: {
    get idInTest() { return globalThis.vu.id; },
    get iterationInScenario() { return globalThis.vu.iteration; },
  },
};
