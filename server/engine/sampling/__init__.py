"""Turn logits into tokens: token masks, the logits that wait for them, and sampling."""
