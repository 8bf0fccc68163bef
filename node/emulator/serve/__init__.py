"""An OpenAI-compatible server over the emulated engine: the asyncio shell."""
