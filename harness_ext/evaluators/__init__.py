"""Pure evaluators: arrays of scores or features in, frozen results out. No model, no files, no lm_eval.

Import the module that is wanted, such as `harness_ext.evaluators.natural`; this package imports nothing itself, so that
a task which only scores label words does not pay for scikit-learn.
"""
