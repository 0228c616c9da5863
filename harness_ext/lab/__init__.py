"""Makes small language models of synthetic languages in which every true value is known.

The lab knows nothing of lm_eval or of the rest of the package; it meets them only through model folders and JSON lines.
A language gives samples, exact probabilities, a tokenizer and downstream datasets with their Bayes-optimal accuracy
(`lab.languages`); `lab.model` builds a model, `lab.train` trains, measures and saves it.
"""
