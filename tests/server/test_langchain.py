"""LangChain's ChatOpenAI against the server."""

import pytest
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

from server.conftest import API_KEY


@pytest.fixture
def chat(server):
    return ChatOpenAI(base_url=f"{server[0]}/v1", api_key=API_KEY, model="smol", temperature=0, max_tokens=60)


def test_invoke_and_stream_agree(chat):
    whole = chat.invoke("Name a colour.")
    assert whole.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.text for chunk in chat.stream("Name a colour.")) == whole.text


def test_tools(chat):
    @tool
    def get_weather(city: str) -> str:
        """The weather in a city."""
        return f"rain in {city}"

    bound = chat.bind_tools([get_weather], tool_choice="get_weather")
    (call,) = bound.invoke("What is the weather in Paris?").tool_calls
    assert call["name"] == "get_weather"
    assert set(call["args"]) == {"city"}


def test_structured_output(chat):
    class Person(BaseModel):
        name: str = Field(max_length=20)
        age: int = Field(ge=0, le=150)

    person = chat.with_structured_output(Person, method="json_schema").invoke("Ann is 31 years old.")
    assert isinstance(person, Person)


def test_embeddings(server):
    embeddings = OpenAIEmbeddings(
        base_url=f"{server[0]}/v1", api_key=API_KEY, model="smol", check_embedding_ctx_length=False
    )
    assert len(embeddings.embed_query("A cat")) == 576
