// How numbers look, and their intervals.
"use strict";

const {
  scoreInterval,
  wilson,
  fixed,
  percent,
  significant,
  showScore,
  showInterval,
  showCount,
  showParameters,
  measureName,
  showDate,
  plural,
  MINUS,
} = (() => {
  const Z = 1.959963984540054; // of a two-sided 95 % interval
  const MINUS = "\u2212";

  /** Wilson's 95 % interval of a share. */
  function wilson(value, n) {
    const centre = (value + (Z * Z) / (2 * n)) / (1 + (Z * Z) / n);
    const half = (Z / (1 + (Z * Z) / n)) * Math.sqrt((value * (1 - value)) / n + (Z * Z) / (4 * n * n));
    return [Math.max(0, centre - half), Math.min(1, centre + half)];
  }

  /**
   * The rule of `Score.interval`: value -+ 1.96 stderr, cut to [0, 1] where bounded; Wilson's of a share without a stderr; or
   * null.
   */
  function scoreInterval(value, stderr, n, bounded, isShare) {
    const inside = value >= 0 && value <= 1;
    if (stderr > 0) {
      const [low, high] = [value - Z * stderr, value + Z * stderr];
      return bounded && inside ? [Math.max(0, low), Math.min(1, high)] : [low, high];
    }
    return isShare && inside && n > 0 ? wilson(value, n) : null;
  }

  const sign = (text) => text.replace("-", MINUS);

  /** So many digits after the point, with a true minus, and never -0. */
  const fixed = (value, digits) => sign(value.toFixed(digits).replace(/^-(0(\.0*)?)$/, "$1"));

  const percent = (value, digits = 1) => fixed(100 * value, digits);

  const SUPERSCRIPT = "⁰¹²³⁴⁵⁶⁷⁸⁹";
  const superscript = (number) =>
    String(number)
      .replace("-", "⁻")
      .replace(/\d/g, (digit) => SUPERSCRIPT[digit]);

  /** A number to significant digits, in powers of ten where it is far from one. */
  function significant(value, digits = 3) {
    if (value === 0) return "0";
    const exponent = Math.floor(Math.log10(Math.abs(Number(value.toPrecision(digits)))));
    if (exponent < -3 || exponent > 5) {
      const mantissa = (value / 10 ** exponent).toFixed(digits - 1);
      return `${sign(mantissa)} × 10${superscript(exponent)}`;
    }
    const text = value.toFixed(Math.max(0, digits - 1 - exponent));
    return sign(exponent >= 4 ? Number(text).toLocaleString("en-US") : text);
  }

  /** Scores between 0 and 1 in per cent, others to four digits. */
  const showScore = (value, bounded) => (bounded ? percent(value) : significant(value, 4));

  const showInterval = (interval, bounded) =>
    interval ? `[${showScore(interval[0], bounded)}, ${showScore(interval[1], bounded)}]` : "no interval";

  const showCount = (count) => count.toLocaleString("en-US");

  function showParameters(count) {
    for (const [unit, letter] of [
      [1e12, "T"],
      [1e9, "B"],
      [1e6, "M"],
      [1e3, "k"],
    ])
      if (count >= unit) return `${Number((count / unit).toPrecision(3))} ${letter}`;
    return String(count);
  }

  const MEASURES = {
    hessian_trace: "Hessian trace",
    fisher_trace: "Fisher trace",
    lambda_max: "largest eigenvalue",
    hessian_over_fisher: "Hessian over Fisher",
  };
  function measureName(measure) {
    for (const [name, text] of Object.entries(MEASURES))
      if (measure === name || measure.startsWith(`${name}_`))
        return (
          text +
          measure
            .slice(name.length)
            .replace("_scaled", ", scaled by weights")
            .replace("_per_mparam", " per million parameters")
            .replaceAll("_", " ")
        );
    return measure.replaceAll("_", " ");
  }

  /** Seconds since 1970 as a date in UTC. */
  const showDate = (seconds) => new Date(seconds * 1000).toISOString().slice(0, 16).replace("T", " ") + " UTC";

  const plural = (count, one, many = `${one}s`) => `${showCount(count)} ${count === 1 ? one : many}`;

  return {
    scoreInterval,
    wilson,
    fixed,
    percent,
    significant,
    showScore,
    showInterval,
    showCount,
    showParameters,
    measureName,
    showDate,
    plural,
    MINUS,
  };
})();
