"""Training scripts as people publish them, in our own words and small: each is a page with a model, data, and a loss or step."""

from tests.jobs.ported import character_gpt, mnist, recommender, tiny_bert, vae, word_model

PORTED = {
    "a character GPT": character_gpt.IDIOM,
    "a recommender with embeddings": recommender.IDIOM,
    "a word model as a stream": word_model.IDIOM,
    "a VAE with a summed loss": vae.IDIOM,
    "a tiny BERT": tiny_bert.IDIOM,
    "the convolutional network of the MNIST example": mnist.IDIOM,
}
