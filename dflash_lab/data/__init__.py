"""What the drafter is trained on: conversations, samples, lengths, batch plans."""
