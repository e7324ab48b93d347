// The night desk of a hotel: `node agent.ts "who sleeps in room 214?"`, on the model of OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL.
import { readFileSync } from "node:fs";
import { openai } from "@ai-sdk/openai";
import { generateText, stepCountIs, tool } from "ai";
import { z } from "zod";

type Room = { guest: string; rate: string; view: string };
const rooms: Record<string, Room> = JSON.parse(readFileSync(new URL("rooms.json", import.meta.url), "utf8"));

const look = (field: keyof Room) =>
  tool({
    description: `The ${field} of a room.`,
    inputSchema: z.object({ room: z.string() }),
    execute: async ({ room }) => ({ [field]: rooms[room]?.[field] ?? "no such room" }),
  });

const { text } = await generateText({
  model: openai(process.env.OPENAI_MODEL ?? "gpt-5-mini"),
  tools: { room_guest: look("guest"), room_rate: look("rate"), room_view: look("view") },
  prompt: process.argv[2],
  maxOutputTokens: 64,
  stopWhen: stepCountIs(4),
});
console.log(text);
