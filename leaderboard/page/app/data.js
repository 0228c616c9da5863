// The data files: scripts that call harnessExt.data, because nothing can be fetched from file://.
"use strict";

const harnessExt = (() => {
  const NAME = /^(index|(models|columns|documents)\/[mc][0-9a-f]{12})$/;
  const fileOf = (name) => {
    if (!NAME.test(name)) throw new Error(`There is no data file of the name ${name}.`);
    return `data/${name}.js`;
  };
  // Where browsers know trusted types, the page's policy lets a script be loaded by this alone.
  const rule = {createScriptURL: fileOf};
  const policy = window.trustedTypes?.createPolicy("data-files", rule) ?? rule;

  const arrived = new Map();
  const waiting = new Map();

  /** Called by data files. */
  function data(name, value) {
    arrived.set(name, value);
  }

  /**
   * The content of a data file, loaded when first asked for.
   * @param {string} name Such as "models/m0123456789ab".
   * @returns {Promise<Object>} Rejected where the file is missing or does not say what it should.
   */
  function load(name) {
    if (arrived.has(name)) return Promise.resolve(arrived.get(name));
    if (!waiting.has(name))
      waiting.set(
        name,
        new Promise((resolve, reject) => {
          const url = policy.createScriptURL(name);
          const script = document.createElement("script");
          script.src = url;
          script.onload = () =>
            arrived.has(name) ? resolve(arrived.get(name)) : reject(new Error(`data/${name}.js is damaged.`));
          script.onerror = () => reject(new Error(`data/${name}.js is missing. Build the site again.`));
          document.head.append(script);
        }),
      );
    return waiting.get(name);
  }

  return {data, load, has: (name) => arrived.has(name)};
})();

const {Board, modelDetails} = (() => {
  const SCHEMA_VERSION = 1;
  const DOWNSTREAM = new Set(["natural", "probe", "quad", "kernel", "finetune", "other"]);

  /** Undo `_columnar` of site.py: a list of records; a blank has no key. */
  function records({length, keys}) {
    const result = Array.from({length}, () => ({}));
    for (const [key, packed] of Object.entries(keys))
      for (let place = 0; place < length; place++) {
        const value = Array.isArray(packed) ? packed[place] : packed.values[packed.at[place]];
        if (value !== null) result[place][key] = value;
      }
    return result;
  }

  /** Undo `_packed_scores` of site.py: value, standard error (NaN where blank) and number of documents, by place. */
  function scoresOf(packed, length) {
    if (packed === null) return null;
    const {scale = 1, share = false, flags} = packed;
    const value = new Float64Array(length).fill(NaN);
    const stderr = new Float64Array(length).fill(NaN);
    const n = Array.isArray(packed.n) ? new Array(length).fill(null) : packed.n;
    packed.value.forEach((number, at) => {
      if (number === null) return;
      const place = packed.places ? packed.places[at] : at;
      value[place] = number / scale;
      if (Array.isArray(n)) n[place] = packed.n[at];
      const known = share ? packed.stderr[place] : packed.stderr[at];
      if (share && known === undefined) {
        const count = Array.isArray(n) ? n[place] : n;
        stderr[place] = Math.sqrt((value[place] * (1 - value[place])) / (count - 1));
      } else if (known !== null && known !== undefined) stderr[place] = known / scale;
    });
    const limit = new Map();
    for (const [flag, places] of Object.entries(flags))
      if (flag.startsWith("limit: ")) for (const place of places) limit.set(place, flag.slice("limit: ".length));
    return {value, stderr, n, limit, conflict: new Set(flags.conflict), note: new Set(flags.note)};
  }

  /** The index, ready for use. */
  class Board {
    constructor(index) {
      if (index.schema_version !== SCHEMA_VERSION)
        throw new Error(
          `The data has schema version ${index.schema_version}; these pages read ${SCHEMA_VERSION}. Build the site again.`,
        );
      this.index = index;
      this.models = records(index.models);
      this.models.forEach((model, place) => (model.place = place));
      this.place = new Map(this.models.map((model, place) => [model.id, place]));
      this.columns = index.columns;
      this.columns.forEach((column, place) => {
        column.place = place;
        column.downstream = DOWNSTREAM.has(column.kind);
        column.full = scoresOf(index.scores[place], this.models.length);
        column.limited = scoresOf(index.limited[place], this.models.length);
        column.better = column.higher_is_better[column.metric] ?? true;
      });
      this.columnById = new Map(this.columns.map((column) => [column.id, column]));
      this.downstream = this.columns.filter((column) => column.downstream);
      this.losses = records(index.losses);
      this.flatness = records(index.flatness).map((record) => {
        const measures = new Map();
        for (const [key, value] of Object.entries(record))
          if (key.startsWith("measure ") && value[0] !== null) measures.set(key.slice("measure ".length), value);
        return {model: record.model, column: record.column, limit: record.limit, measures};
      });
      this.families = [...new Set(this.models.map((model) => model.family ?? ""))].sort();
      this.axes = this.#axes();
      this.flatnessKinds = this.#flatnessKinds();
      this.hasFull = this.#hasFull();
    }

    get empty() {
      return this.models.length === 0;
    }

    /**
     * One cell of the table.
     * @returns {?{value: number, stderr: number, interval: ?number[], n: ?number, limit: ?string, conflict: boolean, note: boolean}}
     *   null for a blank. A limited run counts only where `limited` is true and there is no full one.
     */
    score(column, place, limited) {
      return this.#cell(column, column.full, place) ?? (limited ? this.#cell(column, column.limited, place) : null);
    }

    value(column, place, limited) {
      const full = column.full ? column.full.value[place] : NaN;
      return full === full || !limited || !column.limited ? full : column.limited.value[place];
    }

    #cell(column, scores, place) {
      if (scores === null || Number.isNaN(scores.value[place])) return null;
      const n = Array.isArray(scores.n) ? scores.n[place] : scores.n;
      const [value, stderr] = [scores.value[place], scores.stderr[place]];
      return {
        value,
        stderr,
        n,
        interval: scoreInterval(value, stderr, n, column.bounded, column.is_share),
        limit: scores.limit.get(place) ?? null,
        conflict: scores.conflict.has(place),
        note: scores.note.has(place),
      };
    }

    /** Models with at least one result of a run that is not limited. */
    #hasFull() {
      const has = new Array(this.models.length).fill(false);
      for (const {full} of this.columns)
        if (full) full.value.forEach((value, place) => (has[place] ||= !Number.isNaN(value)));
      for (const {model, limit} of [...this.losses, ...this.flatness]) if (!limit) has[this.place.get(model)] = true;
      return has;
    }

    /** The ways of measuring loss: each has one text, and one tokenizer where it is in nats per token. */
    #axes() {
      const axes = new Map();
      const add = (id, axis, loss, metric) => {
        if (!metric || metric[0] === null) return;
        if (!axes.has(id)) axes.set(id, {id, ...axis, loss: new Map()});
        const {loss: of} = axes.get(id);
        const place = this.place.get(loss.model);
        // A full run before a limited one.
        if (!of.has(place) || (of.get(place).limit && !loss.limit))
          of.set(place, {
            value: metric[0],
            stderr: metric[1] ?? 0,
            hasStderr: metric[1] !== null,
            limit: loss.limit ?? null,
          });
      };
      for (const loss of this.losses) {
        const text = {text: loss.text, label: loss.text_label, measure: "nats_per_token"};
        if (loss.text.startsWith("excess/"))
          add(`x${digest(loss.text)}`, {...text, unit: "excess nats per token"}, loss, loss.nats_per_token);
        else {
          add(
            `b${digest(loss.text)}`,
            {...text, measure: "bits_per_byte", unit: "bits per byte"},
            loss,
            loss.bits_per_byte,
          );
          if (loss.tokenizer)
            add(
              `n${digest(`${loss.text} ${loss.tokenizer}`)}`,
              {...text, label: `${loss.text_label}, tokenizer ${loss.tokenizer.slice(0, 6)}`, unit: "nats per token"},
              loss,
              loss.nats_per_token,
            );
        }
      }
      // As `main_text` in compare.py: an exact excess loss resolves more, and comes first if nearly as many models have it.
      const weight = ({id, loss}) => loss.size * {x: 4, b: 3, n: 0}[id[0]];
      return [...axes.values()].sort((a, b) => weight(b) - weight(a) || (a.id < b.id ? -1 : 1));
    }

    /** A measure of flatness on one column, with the models that have it. */
    #flatnessKinds() {
      const kinds = new Map();
      for (const {model, column, limit, measures} of this.flatness)
        for (const [measure, [value, stderr]] of measures) {
          const id = `${column}.${measure}`;
          if (!kinds.has(id))
            kinds.set(id, {
              id,
              column,
              measure,
              label: `${measureName(measure)}, ${this.columnById.get(column)?.label ?? column}`,
              of: new Map(),
            });
          const {of} = kinds.get(id);
          const place = this.place.get(model);
          if (!of.has(place) || (of.get(place).limit && !limit)) of.set(place, {value, stderr, limit: limit ?? null});
        }
      // Of two traces of one size the Fisher trace has the smaller error.
      const preferred = ["fisher_trace", "hessian_trace"];
      const rank = ({measure}) => (preferred.includes(measure) ? preferred.indexOf(measure) : preferred.length);
      return [...kinds.values()].sort((a, b) => b.of.size - a.of.size || rank(a) - rank(b) || (a.id < b.id ? -1 : 1));
    }
  }

  /** What tells models of one name apart. */
  function modelDetails(model) {
    return [
      model.revision && model.revision !== "main" ? `revision ${model.revision}` : null,
      model.dtype ?? null,
      model.chat_template ? `chat template ${model.chat_template}` : null,
      model.system_instruction ? `system instruction ${model.system_instruction}` : null,
      ...(model.model_args ?? []).map(([name, value]) => `${name}=${value}`),
    ]
      .filter(Boolean)
      .join(", ");
  }

  /** FNV-1a, for short names of axes in the address; not for safety. */
  function digest(text) {
    let hash = 0x811c9dc5;
    for (let at = 0; at < text.length; at++) hash = Math.imul(hash ^ text.charCodeAt(at), 0x01000193);
    return (hash >>> 0).toString(16).padStart(8, "0");
  }

  return {Board, modelDetails};
})();
