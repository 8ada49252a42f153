"""Executes plans: reads, writes and commits. A subpackage imports only those before it here.

`data`: the bytes of tensors and chunks, and the threads that move them.
`checkpoint`: a checkpoint in a store, its `metadata.json` and the directories of its steps.
`saving` and `loading`: the two recipes; `loading` does not import `saving`.
`verification`: every byte of a checkpoint, checked.
`tiers`: saves into storage of the nodes.
`background`: asynchronous saves.
"""
