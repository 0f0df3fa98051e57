"""How fast, and against what: prompts × drafters × rules, in alternation, on this machine."""
