"""What a step costs, by counting alone: `flops`, `memory`, and `gpu_rates` from data sheets."""
