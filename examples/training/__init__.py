"""Parts of pretrain_gpt.py: arguments, text, schedule, the training loop and its reports."""
