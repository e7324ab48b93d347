// Agents that call a tool and then answer, each as its library's users write it: `node agents.mjs LIBRARY whole|streamed ORDER`.
// They read where the model is from the environment alone. The last line that is printed is the answer.

const [library, mode, order] = process.argv.slice(2);
const streamed = mode === "streamed";
const model = process.env.OFFBOOK_MODEL;
const added = ({ a, b }) => {
  if (a < 0) Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, -1000 * a); // a slow tool: so many seconds
  return String(a + b);
};
const name = "add";
const description = "Add two numbers.";
const integer = { type: "integer" };
const parameters = { type: "object", properties: { a: integer, b: integer }, required: ["a", "b"] };

const agents = {
  async openai() {
    const { default: OpenAI } = await import("openai");
    const { completions } = new OpenAI({ maxRetries: 0 }).chat;
    const messages = [{ role: "user", content: order }];
    for (;;) {
      const asked = { model, messages, max_tokens: 64, tools: [{ type: "function", function: { name, description, parameters } }] };
      const answer = streamed
        ? await completions.stream(asked).finalMessage()
        : (await completions.create(asked)).choices[0].message;
      messages.push(answer);
      if (!answer.tool_calls?.length) return answer.content;
      for (const call of answer.tool_calls)
        messages.push({ role: "tool", tool_call_id: call.id, content: added(JSON.parse(call.function.arguments)) });
    }
  },

  async "openai responses"() {
    const { default: OpenAI } = await import("openai");
    const { responses } = new OpenAI({ maxRetries: 0 });
    const input = [{ role: "user", content: order }];
    for (;;) {
      const asked = { model, input, tools: [{ type: "function", strict: false, name, description, parameters }] };
      const answer = streamed ? await responses.stream(asked).finalResponse() : await responses.create(asked);
      input.push(...answer.output);
      const calls = answer.output.filter((item) => item.type === "function_call");
      if (!calls.length) return answer.output_text;
      for (const call of calls)
        input.push({ type: "function_call_output", call_id: call.call_id, output: added(JSON.parse(call.arguments)) });
    }
  },

  async "@anthropic-ai/sdk"() {
    const { default: Anthropic } = await import("@anthropic-ai/sdk");
    const client = new Anthropic({ maxRetries: 0 });
    const messages = [{ role: "user", content: order }];
    for (;;) {
      const asked = { model, max_tokens: 64, messages, tools: [{ name, description, input_schema: parameters }] };
      const answer = streamed ? await client.messages.stream(asked).finalMessage() : await client.messages.create(asked);
      messages.push({ role: "assistant", content: answer.content });
      const uses = answer.content.filter((block) => block.type === "tool_use");
      if (!uses.length) return answer.content[0].text;
      const results = uses.map((use) => ({ type: "tool_result", tool_use_id: use.id, content: added(use.input) }));
      messages.push({ role: "user", content: results });
    }
  },

  async "@google/genai"() {
    const { GoogleGenAI } = await import("@google/genai");
    const tools = [{ functionDeclarations: [{ name, description, parametersJsonSchema: parameters }] }];
    const chat = new GoogleGenAI({ apiKey: process.env.GEMINI_API_KEY }).chats.create({ model, config: { tools } });
    let message = order;
    for (;;) {
      const chunks = [];
      if (streamed) for await (const chunk of await chat.sendMessageStream({ message })) chunks.push(chunk);
      else chunks.push(await chat.sendMessage({ message }));
      const calls = chunks.flatMap((chunk) => chunk.functionCalls ?? []);
      if (!calls.length) return chunks.map((chunk) => chunk.text ?? "").join("");
      message = calls.map((call) => ({ functionResponse: { name, id: call.id, response: { output: added(call.args) } } }));
    }
  },

  async "@ai-sdk/openai"() {
    const { openai } = await import("@ai-sdk/openai");
    return vercel(openai(model));
  },

  async "@ai-sdk/openai chat"() {
    const { openai } = await import("@ai-sdk/openai");
    return vercel(openai.chat(model));
  },

  async "@ai-sdk/anthropic"() {
    const { anthropic } = await import("@ai-sdk/anthropic");
    return vercel(anthropic(model));
  },

  async "@langchain/openai"() {
    const { ChatOpenAI } = await import("@langchain/openai");
    return langgraph(new ChatOpenAI({ model, maxRetries: 0 }));
  },

  async "@langchain/openai responses"() {
    const { ChatOpenAI } = await import("@langchain/openai");
    return langgraph(new ChatOpenAI({ model, maxRetries: 0, useResponsesApi: true }));
  },

  async "@langchain/anthropic"() {
    const { ChatAnthropic } = await import("@langchain/anthropic");
    return langgraph(new ChatAnthropic({ model, maxRetries: 0, maxTokens: 64 }));
  },
};

async function vercel(chat) {
  const { generateText, stepCountIs, streamText, tool } = await import("ai");
  const { z } = await import("zod");
  const inputSchema = z.object({ a: z.number().int(), b: z.number().int() });
  const tools = { add: tool({ description, inputSchema, execute: async (numbers) => added(numbers) }) };
  const asked = { model: chat, tools, prompt: order, stopWhen: stepCountIs(6), maxRetries: 0 };
  if (!streamed) return (await generateText(asked)).text;
  return await streamText({ ...asked, onError: ({ error }) => { throw error; } }).text;
}

async function langgraph(llm) {
  const { createReactAgent } = await import("@langchain/langgraph/prebuilt");
  const { tool } = await import("@langchain/core/tools");
  const { z } = await import("zod");
  const schema = z.object({ a: z.number().int(), b: z.number().int() });
  const agent = createReactAgent({ llm, tools: [tool(async (numbers) => added(numbers), { name, description, schema })] });
  const input = { messages: [{ role: "user", content: order }] };
  if (!streamed) return (await agent.invoke(input)).messages.at(-1).text;
  let last = "";
  let id;
  for await (const [chunk] of await agent.stream(input, { streamMode: "messages" })) {
    last = chunk.id === id ? last + chunk.text : chunk.text;
    id = chunk.id;
  }
  return last;
}

console.log(await agents[library]());
