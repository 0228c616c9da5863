"""Everything that runs the evaluated language model.

`tokens` turns prompts into token ids, `plan` says which sequences are forwarded together, `forward` runs the model and
reads f(s) and log-probabilities, `store` keeps f(s) on disk, `answer` ties them into one pass over all prompts of all
tasks, and `attach` gives lm_eval's models the request type `prompt_states`.
"""
