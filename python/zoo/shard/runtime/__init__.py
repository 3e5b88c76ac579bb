"""What happens when: the hooks and verbs that unshard, reshard and reduce while a model runs."""
