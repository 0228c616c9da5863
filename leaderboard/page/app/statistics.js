// What is computed in the page: aggregates over the tasks that are shown, and paired comparisons of two models.
"use strict";

const {mcnemar, pairedBootstrap, alignVectors, aggregates, rankRanges} = (() => {
  const ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_";

  /**
   * McNemar's exact test of two models on the same documents. Source: McNemar (1947), with the binomial distribution.
   * @param {number} b Documents that the first alone has right. @param {number} c The second alone.
   * @returns {number} Two-sided p-value: min(1, 2 P(X <= min(b, c))), X of Binomial(b + c, 1/2).
   */
  function mcnemar(b, c) {
    const n = b + c;
    let logTerm = -n * Math.LN2;
    let tail = Math.exp(logTerm);
    for (let k = 1; k <= Math.min(b, c); k++) {
      logTerm += Math.log((n - k + 1) / k);
      tail += Math.exp(logTerm);
    }
    return Math.min(1, 2 * tail);
  }

  /** Uniform numbers in [0, 1) from a seed: mulberry32. The same pair of models always gets the same interval. */
  function generator(seed) {
    let state = seed >>> 0;
    return () => {
      state = (state + 0x6d2b79f5) >>> 0;
      let t = Math.imul(state ^ (state >>> 15), state | 1);
      t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
      return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
    };
  }

  /**
   * Percentile interval of a mean difference, resampling documents. In slices, so that the page never stands still.
   * @param {Float64Array} differences First less second, a number a document.
   * @returns {Promise<number[]>} 95 % interval of the mean.
   */
  async function pairedBootstrap(differences, {draws = 2000, seed = 0, slice = 12} = {}) {
    const uniform = generator(seed);
    const n = differences.length;
    const means = new Float64Array(draws);
    let until = performance.now() + slice;
    for (let draw = 0; draw < draws; draw++) {
      let sum = 0;
      for (let k = 0; k < n; k++) sum += differences[(uniform() * n) | 0];
      means[draw] = sum / n;
      if (performance.now() > until) {
        await new Promise((resume) => setTimeout(resume));
        until = performance.now() + slice;
      }
    }
    means.sort();
    return [quantile(means, 0.025), quantile(means, 0.975)];
  }

  /** Of sorted numbers, by linear interpolation. */
  function quantile(sorted, share) {
    const at = share * (sorted.length - 1);
    const below = Math.floor(at);
    return sorted[below] + (at - below) * ((sorted[below + 1] ?? sorted[below]) - sorted[below]);
  }

  /** Key of a document -> value of a model on it. */
  function decode(vector, documents) {
    const values = new Map();
    for (let at = 0; at < documents.length; at++) {
      const code = vector.codes[at];
      if (code !== undefined && code !== ".") values.set(documents[at], vector.values[ALPHABET.indexOf(code)]);
    }
    return values;
  }

  /**
   * Two models on the documents that both have, or why they do not compare.
   * @returns {{refused: string}|{keys: string[], first: Float64Array, second: Float64Array, part: boolean}} `part`: one has more
   *   documents than the other.
   */
  function alignVectors(file, firstId, secondId) {
    const pick = (id) => {
      const all = file.vectors.filter((vector) => vector.model === id);
      return all.find((vector) => !vector.limit) ?? all[0];
    };
    const [a, b] = [pick(firstId), pick(secondId)];
    if (!a || !b)
      return {
        refused: `no right and wrong by document for ${!a && !b ? "either model" : "one of the models"}: evaluate with --log_samples`,
      };
    const first = decode(a, file.document_sets[a.documents]);
    const second = decode(b, file.document_sets[b.documents]);
    const [small, large] = first.size <= second.size ? [first, second] : [second, first];
    const shared = [...small.keys()].filter((key) => large.has(key));
    if (shared.length < small.size || shared.length === 0)
      return {
        refused: `the documents differ: ${showCount(shared.length)} of ${showCount(first.size)} and ${showCount(second.size)} are shared`,
      };
    return {
      keys: shared,
      part: small.size < large.size,
      first: Float64Array.from(shared, (key) => first.get(key)),
      second: Float64Array.from(shared, (key) => second.get(key)),
    };
  }

  /**
   * Aggregates over tasks, for the models that have all of them.
   * @param {{value: function(number): number, stderr: function(number): ?number, chance: number, better: boolean, dataset: string}[]}
   *   tasks
   * @param {number[]} places Models.
   * @returns {Map<number, {k: number, n: number, mean: ?number, stderr: ?number, wins: ?number, borda: ?number}>} mean of
   *   (value - chance) / (1 - chance) and its standard error, with errors of tasks on one dataset added up and datasets taken as independent; share of the other complete models that
   *   are beaten, a tie counting half, averaged over tasks (HELM's mean win rate); Borda points, their sum over models and tasks.
   */
  function aggregates(tasks, places) {
    const n = tasks.length;
    const result = new Map();
    const complete = [];
    for (const place of places) {
      let k = 0;
      for (const task of tasks) if (!Number.isNaN(task.value(place))) k++;
      const row = {k, n, mean: null, stderr: null, wins: null, borda: null};
      result.set(place, row);
      if (n === 0 || k < n) continue;
      complete.push(place);
      let sum = 0,
        known = true;
      const errors = new Map();
      for (const task of tasks) {
        const room = 1 - task.chance;
        sum += (task.value(place) - task.chance) / room;
        const stderr = task.stderr(place);
        if (stderr === null) known = false;
        else errors.set(task.dataset, (errors.get(task.dataset) ?? 0) + stderr / room);
      }
      row.mean = sum / n;
      row.stderr = known ? Math.hypot(...errors.values()) / n : null;
    }
    const points = new Map(complete.map((place) => [place, 0]));
    for (const task of tasks) {
      const sorted = [...complete].sort((a, b) => task.value(a) - task.value(b));
      for (let from = 0; from < sorted.length;) {
        let to = from;
        while (to < sorted.length && task.value(sorted[to]) === task.value(sorted[from])) to++;
        // `from` are below, and half of the to - from - 1 that tie.
        const beaten = from + (to - from - 1) / 2;
        for (let at = from; at < to; at++)
          points.set(sorted[at], points.get(sorted[at]) + (task.better ? beaten : sorted.length - 1 - beaten));
        from = to;
      }
    }
    for (const [place, borda] of points) {
      result.get(place).borda = borda;
      if (complete.length > 1) result.get(place).wins = borda / (n * (complete.length - 1));
    }
    return result;
  }

  /**
   * The ranks that intervals leave open.
   * @param {{low: number, high: number}[]} intervals Of all members of a group.
   * @returns {number[][]} [best, worst] of each: after all that lie wholly above, before all that lie wholly below.
   */
  function rankRanges(intervals) {
    const lows = Float64Array.from(intervals, ({low}) => low).sort();
    const highs = Float64Array.from(intervals, ({high}) => high).sort();
    return intervals.map(({low, high}) => [
      intervals.length - countUpTo(lows, high, true) + 1,
      intervals.length - countUpTo(highs, low, false),
    ]);
  }

  /** How many of sorted numbers are below a bound, or at it where `including`. */
  function countUpTo(sorted, bound, including) {
    let [low, high] = [0, sorted.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (sorted[middle] < bound || (including && sorted[middle] === bound)) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  return {mcnemar, pairedBootstrap, alignVectors, aggregates, rankRanges};
})();
