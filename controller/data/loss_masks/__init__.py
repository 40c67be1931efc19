"""Loss masks: which characters of a rendered conversation are learnt, then which tokens.

    messages ─template─▶ text, spans of the assistant's turns ─▶ pieces ─tokenizer─▶ ids, mask

A turn of the assistant is what rendering up to this turn adds to rendering up to the one before with the generation
prompt, less the white space that follows its last visible text: what a model would generate there, with the tokens
that end the turn. Where a template rewrites earlier turns (Qwen3 drops their thoughts), so that neither rendering
begins the whole text, the turn begins behind what its prompt has after the message before, or where a marker in its
content stands; a marker shows where its content or last call ends, and what follows is taken from the rendering up to
this turn. A template with `{% generation %}` blocks says itself what is learnt. What stays ambiguous: `DataError`.

No character offset of a tokenizer is used: each piece of the text, learnt or not, is encoded apart, as generation
sees a prompt and then its own tokens.

rendered   a conversation as text with its learnt spans; how they are found where a template has generation blocks
turns      how they are found where it has none
tokens     token ids and masks of the pieces, and whether an answer ends where generation would stop
"""
