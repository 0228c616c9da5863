"""Result files of lm_eval -> checked rows -> loss-matched groups -> a static site.

Meets the rest of the package through JSON files only.
"""
