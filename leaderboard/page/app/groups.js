// Groups of models with equal loss: harness_ext/loss_groups.py, which has the rule and its reasons, for the slider.
"use strict";

const {lossGroups} = (() => {
  /**
   * @param {number[]} losses Finite, in one unit.
   * @param {number[]} stderrs Their standard errors.
   * @param {{tolerance: number, z: number, minSize?: number}} options As in Python.
   * @returns {{members: number[], gap: number, stderr: number, bound: number}[]} Groups by ascending loss; `members` are
   *   places in the input.
   */
  function lossGroups(losses, stderrs, {tolerance, z, minSize = 2}) {
    const order = losses.map((_, place) => place).sort((a, b) => losses[a] - losses[b] || a - b);
    const kept = order.filter((place) => z * stderrs[place] <= tolerance);
    const value = kept.map((place) => losses[place]);
    const variance = kept.map((place) => stderrs[place] ** 2);

    // For the first j models: how many are in groups, in how many groups, the sum of gaps, and where the last begins.
    const models = [0],
      groups = [0],
      gaps = [0],
      start = [-1];
    for (let last = 0; last < kept.length; last++) {
      let [m, g, s, begin] = [models[last], groups[last], gaps[last], -1];
      for (let first = last - minSize + 1; first >= 0; first--) {
        const gap = value[last] - value[first];
        if (gap > tolerance) break;
        if (gap + z * Math.sqrt(variance[first] + variance[last]) > tolerance) continue;
        const [m2, g2, s2] = [models[first] + last - first + 1, groups[first] + 1, gaps[first] + gap];
        if (m2 > m || (m2 === m && (g2 < g || (g2 === g && s2 < s)))) [m, g, s, begin] = [m2, g2, s2, first];
      }
      (models.push(m), groups.push(g), gaps.push(s), start.push(begin));
    }

    const found = [];
    for (let end = kept.length; end > 0;) {
      const begin = start[end];
      if (begin < 0) {
        end--;
        continue;
      }
      const gap = value[end - 1] - value[begin];
      const stderr = Math.sqrt(variance[begin] + variance[end - 1]);
      found.push({members: kept.slice(begin, end), gap, stderr, bound: gap + z * stderr});
      end = begin;
    }
    return found.reverse();
  }

  return {lossGroups};
})();
