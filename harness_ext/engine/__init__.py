"""Everything that runs the evaluated language model.

`tokens` turns prompts into token ids, `plan` says which sequences are forwarded together, `forward` runs the model and reads
f(s), `readout` makes log-probabilities and mixtures of p_f from states, `store` keeps them on disk, `answer` ties them into one
pass over all prompts of all tasks, and `attach` gives lm_eval's models the request type `prompt_states`. On top of a pass,
`quad_head` trains Quad heads on states and `label_words` searches label words.
"""
