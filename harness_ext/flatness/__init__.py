"""Curvature of the pretraining loss at a model's weights: traces and the largest eigenvalue, each with its error.

Pure: a model and blocks of tokens go in, numbers come out. `loss` is the function that is differentiated; `fisher`, `hessian`
and `eigenvalue` estimate, and `run` goes through blocks until the errors are small enough; `exact` has slow references; `widen`
embeds a small model in a larger one, and `excess` is what the Hessian of a widened model needs besides the traces; `breakdown`
sums by module.
"""
