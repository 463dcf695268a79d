"""From records to meaning: traces and times; nothing here knows torch, so it runs on a saved record too."""
