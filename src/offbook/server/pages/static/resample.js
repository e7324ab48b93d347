// Samples the prompt of a call again with another step's checkpoint, and shows the answer as text.

const token = document.querySelector('meta[name=csrf]')?.content;

function answerText(message) {
  const calls = (message.tool_calls ?? []).map(({ function: use }) => `${use.name}(${use.arguments})`);
  return [message.reasoning_content, message.content, ...calls].filter(Boolean).join('\n');
}

async function ask(form) {
  const button = form.querySelector('button');
  const output = form.querySelector('output');
  const { trajectory, call, step } = form.elements;
  button.disabled = true;
  output.replaceChildren('Waiting for the engine …');
  try {
    const response = await fetch('/pages/resample', {
      method: 'POST',
      headers: { 'content-type': 'application/json', 'x-offbook-csrf': token },
      body: JSON.stringify({ trajectory: trajectory.value, call: call.value, step: Number(step.value) }),
    });
    const answer = await response.json();
    if (!response.ok) throw new Error(answer.error?.message ?? `status ${response.status}`);
    const choice = answer.choices[0];
    const text = document.createElement('pre');
    text.append(answerText(choice.message) || '(nothing)');
    output.replaceChildren(`Step ${step.value}, ${choice.finish_reason}:`, text);
  } catch (error) {
    output.replaceChildren(`No answer: ${error.message}`);
  } finally {
    button.disabled = false;
  }
}

for (const form of document.querySelectorAll('form.resample')) {
  form.addEventListener('submit', (event) => {
    event.preventDefault();
    ask(form);
  });
}
