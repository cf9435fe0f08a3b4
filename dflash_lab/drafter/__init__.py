"""What is trained: the model, its anchors and masks, the fused loss, the loop, the formats."""
