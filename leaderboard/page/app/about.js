// What the numbers mean, how to add a result, and which files could not be used.
"use strict";

const {showAbout} = (() => {
  function showAbout(page, {board}) {
    const {unreadable, num_files: files, hidden} = board.index;
    const code = (text) => element("pre", {class: "code", tabindex: 0}, text);
    fill(
      page,
      element("h1", {}, "About this leaderboard"),
      element(
        "div",
        {class: "prose"},
        element(
          "p",
          {},
          `Made from ${plural(files, "result file")} of lm_eval by harness_ext. ${plural(hidden.limited_scores, "score")} of limited runs ${hidden.limited_scores === 1 ? "is" : "are"} hidden unless asked for; ${plural(hidden.limited_models, "model")} ${hidden.limited_models === 1 ? "has" : "have"} nothing else.`,
        ),
        element("h2", {}, "How models are compared"),
        element(
          "p",
          {},
          "Models are grouped by their pretraining loss on one text: in a group the largest loss exceeds the smallest by the tolerance at most, with 1.645 standard errors of that difference added. Losses are in bits per byte, which compare between tokenizers; nats per token are offered within one tokenizer only.",
        ),
        element(
          "p",
          {},
          "Within a group, the rank is the range of ranks that the 95 % intervals leave open. Flatness stands beside it: the trace of the Hessian or of the Fisher information of the same loss, smaller is flatter. Source: Liu, Xie, Li and Ma (ICML 2023).",
        ),
        element(
          "p",
          {},
          "A mean over tasks is shown only for models that have all of the tasks shown; each score is first put between chance (0) and perfect (100). Errors of tasks on one dataset, which share documents, are added up for its interval (an upper bound); those of different datasets are taken as independent.",
        ),
        element("h2", {}, "Add a result"),
        code(
          "lm_eval --model hf --model_args pretrained=MODEL \\\n    --tasks natural,loss_wikitext,flatness_wikitext --log_samples --output_path results\nharness-ext leaderboard add results/…/results_….json\nharness-ext leaderboard build",
        ),
        element("h2", {}, "Keys"),
        element(
          "p",
          {},
          "The table is one stop of the Tab key. Arrow keys, Page Up, Page Down, Home and End move in it; Enter sorts by a heading or opens a model; Shift and Enter adds a second sort; Space picks a model for comparison. What is chosen is in the address, so that a view can be linked to.",
        ),
        element("h2", {}, "Files that could not be used"),
        unreadable.length
          ? dataTable(
              "Files that could not be used",
              [["File"], ["Reason"]],
              unreadable.map(({source, reason}) => [
                element("code", {class: "break"}, source),
                element("bdi", {class: "break"}, reason),
              ]),
            )
          : element("p", {class: "muted"}, "None."),
        element("h2", {}, "Libraries"),
        element(
          "p",
          {},
          "Observable Plot and D3 draw the plots; TanStack Table and TanStack Virtual work the table. ",
          element("a", {href: "vendor/LICENSES.txt"}, "Their licences"),
          ".",
        ),
      ),
    );
    return "About";
  }

  return {showAbout};
})();
