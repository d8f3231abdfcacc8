// A stand-in for a language model: it answers known requests with prepared turns.
//
// A turn is code to run, or a function from the last observation to the final answer; an answer can
// therefore only be right if the code was really run.

/** @typedef {string | ((seen: string) => string)} Turn */
/** @typedef {{ code: string } | { text: string }} Reply */

/** @type {Record<string, Turn[]>} */
const SCRIPTS = {
  "What is the 30th Fibonacci number? Compute it, don't guess.": [
    "a, b = 0, 1\nfor _ in range(30):\n    a, b = b, a + b\nprint(a)",
    (seen) => `The 30th Fibonacci number is ${seen.trim()}.`,
  ],
  "Which of the numbers up to 50 are prime, and what is their sum?": [
    // The first attempt is wrong: the model sees the traceback and corrects itself.
    "print(sum(primes))",
    "primes = [n for n in range(2, 51) if all(n % d for d in range(2, n))]\nprint(sum(primes))",
    (seen) => `Their sum is ${seen.trim()}.`,
  ],
  "Count to three, one step at a time.": [
    "n = 1; open('/root/steps', 'a').write('one\\n'); print(n)",
    "n += 1; open('/root/steps', 'a').write('two\\n'); print(n)",
    "n += 1; open('/root/steps', 'a').write('three\\n'); print(n)",
    (seen) => `I have counted to ${seen.trim()}.`,
  ],
};

/**
 * Returns what the model does next, given what its code has printed so far.
 * @param {string} request
 * @param {string[]} seen
 * @returns {Reply}
 */
export function next(request, seen) {
  const turn = SCRIPTS[request]?.[seen.length];
  if (turn === undefined) throw new Error(`there is no script for the request ${request}`);
  return typeof turn === "string" ? { code: turn } : { text: turn(seen.at(-1) ?? "") };
}

/**
 * Returns n bodies for the function `mean`; two of five are right.
 * @param {number} n
 */
export function fixes(n) {
  const bodies = [
    "return sum(values)",
    "return sum(values) / len(values)",
    "return max(values)",
    "return sum(values) // 2",
    "return sum(v / len(values) for v in values)",
  ];
  return Array.from({ length: n }, (_, i) => /** @type {string} */ (bodies[i % bodies.length]));
}
