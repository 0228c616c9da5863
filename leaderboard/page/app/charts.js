// Observable Plot with the look of the pages. A figure says what it shows in words, and draws itself again at another width.
"use strict";

const {
  Plot,
  d3,
  figure,
  plotOptions,
  axisBelow,
  rowNames,
  flatnessScale,
  rampLegend,
  swatches,
  PALETTE,
  kindColour,
  reducedMotion,
} = (() => {
  const {binX, cell, dot, legend, lineY, plot, pointer, rect, rectY, ruleX, ruleY, text, tickX, tip, brush, select} =
    libraries;
  const Plot = {binX, cell, dot, legend, lineY, plot, pointer, rect, rectY, ruleX, ruleY, text, tickX, tip};

  // The colours of Okabe and Ito (2008), which people with any common colour blindness tell apart; style.css has them, lighter on
  // a dark page.
  const KINDS = ["natural", "probe", "quad", "kernel", "finetune", "other"];
  const PALETTE = KINDS.map((kind) => `var(--${kind})`);
  const kindColour = (kind) => (KINDS.includes(kind) ? `var(--${kind})` : "var(--muted)");

  const plotOptions = (width, height) => ({
    className: "chart",
    width,
    height,
    marginLeft: 56,
    marginRight: 16,
    marginTop: 24,
    marginBottom: 44,
  });

  const axisBelow = (label, options = {}) => ({label, labelAnchor: "center", labelArrow: "none", ...options});

  /** An axis of rows, with their names clipped to the margin. */
  const rowNames = (domain, left, name = (text) => text) => ({
    label: null,
    domain,
    type: "band",
    tickSize: 0,
    tickFormat: (of) => clip(name(of), Math.floor(left / 7.4)),
  });

  /** Logarithmic where all are positive; small is flat. */
  function flatnessScale(values, label) {
    const known = values.filter((value) => Number.isFinite(value));
    const positive = known.length > 0 && known.every((value) => value > 0);
    const [low, high] = known.length ? [Math.min(...known), Math.max(...known)] : [0, 1];
    return {
      type: positive && high / low > 3 ? "log" : "linear",
      scheme: "viridis",
      domain: low < high ? [low, high] : [low * 0.9, low * 1.1 || 1],
      label,
    };
  }

  const STEPS = 60;

  /** The colours of a scale with its numbers; Plot's own ramp is an image, which the page's policy does not let in. */
  function rampLegend({label, ...color}, width = 320) {
    const {
      type,
      domain: [low, high],
    } = color;
    const at = (share) => (type === "log" ? low * (high / low) ** share : low + (high - low) * share);
    const steps = Array.from({length: STEPS}, (_, step) => ({
      from: at(step / STEPS),
      to: at((step + 1) / STEPS),
      middle: at((step + 0.5) / STEPS),
    }));
    const ramp = Plot.plot({
      className: "chart",
      width,
      height: 32,
      marginLeft: 8,
      marginRight: 24,
      marginTop: 2,
      marginBottom: 20,
      x: {type, domain: color.domain, label: null, ticks: rampTicks(color), tickFormat: compact, tickSize: 3},
      y: {axis: null, domain: [0, 1]},
      color,
      marks: [Plot.rect(steps, {x1: "from", x2: "to", y1: 0, y2: 1, fill: "middle", inset: -0.25})],
    });
    ramp.setAttribute("aria-hidden", "true");
    const ends = visuallyHidden(`, from ${compact(low)} to ${compact(high)}`);
    return element("div", {class: "ramp"}, element("span", {class: "small muted"}, label, ends), ramp);
  }

  /** A few round numbers: the ticks of a logarithmic ramp would lie over each other. */
  function rampTicks({type, domain: [low, high]}) {
    if (type !== "log") return 4;
    const decades = Math.log10(high / low);
    const steps = decades > 2.5 ? [1] : decades > 1 ? [1, 3] : [1, 1.5, 2, 3, 5, 7];
    const ticks = [];
    for (let exponent = Math.floor(Math.log10(low)); exponent <= Math.log10(high); exponent++)
      for (const step of steps)
        if (step * 10 ** exponent >= low && step * 10 ** exponent <= high) ticks.push(step * 10 ** exponent);
    return ticks;
  }

  /** Names of colours. */
  const swatches = (entries) =>
    element(
      "ul",
      {class: "swatches"},
      entries.map(([name, colour]) => {
        const spot = element("span", {class: "swatch", "aria-hidden": true});
        spot.style.background = colour;
        return element("li", {}, spot, element("bdi", {}, name));
      }),
    );

  const compact = (value) =>
    Math.abs(value) >= 1e6
      ? significant(value, 1).replace("1 × ", "")
      : Number(value.toPrecision(3)).toLocaleString("en-US", {maximumSignificantDigits: 3}).replace("-", MINUS);

  /**
   * A figure that follows its width.
   * @param {{title: string, describe: string, draw: function(number): (Node|Node[]), signal: AbortSignal, note?: string}} options
   *   `describe` is read out in place of the drawing.
   */
  function figure({title, describe, draw, signal, note}) {
    const canvas = element("div", {class: "figure-canvas", role: "img", "aria-label": describe});
    const node = element(
      "figure",
      {class: "figure"},
      title ? element("figcaption", {}, title, note ? element("span", {class: "muted"}, ` ${note}`) : null) : null,
      canvas,
    );
    let drawn = 0;
    const redraw = () => {
      const width = Math.floor(canvas.clientWidth);
      if (width <= 0) return;
      fill(canvas, draw((drawn = width)));
      // Its parts are named by kind, which says nothing: the label of the whole is read instead.
      for (const drawing of canvas.querySelectorAll(":scope svg")) drawing.setAttribute("aria-hidden", "true");
    };
    const observer = new ResizeObserver(() => {
      if (Math.abs(canvas.clientWidth - drawn) >= 1) requestAnimationFrame(redraw);
    });
    observer.observe(canvas);
    signal.addEventListener("abort", () => observer.disconnect());
    node.redraw = redraw;
    node.canvas = canvas;
    return node;
  }

  const reducedMotion = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

  return {
    Plot,
    d3: {brush, select},
    figure,
    plotOptions,
    axisBelow,
    rowNames,
    flatnessScale,
    rampLegend,
    swatches,
    PALETTE,
    kindColour,
    reducedMotion,
  };
})();
